"""Compare speculative decoding strategies: pluggable drafters, one tree verifier, any Hugging Face causal LM."""

from specdec_lab.decode import Generation
from specdec_lab.drafters.base import DraftContext, Drafter, Verification
from specdec_lab.generate import generate
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Acceptance

__all__ = [
    "Acceptance",
    "DraftContext",
    "DraftTree",
    "Drafter",
    "Generation",
    "SamplingParams",
    "Target",
    "Verification",
    "generate",
]
