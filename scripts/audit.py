"""Prove that a strategy keeps the target's output law, or show where it does not.

    python scripts/audit.py drafter=ngram
    python scripts/audit.py drafter=ngram drafter.branches=4 target=tiny
    python scripts/audit.py drafter=ngram acceptance=typical target=tiny

Three proofs: every outcome of the acceptance rule on random trees and laws; every outcome of the whole loop with this
strategy on toy targets; texts against plain decoding on a real target, greedy and sampled, alone and in a batch. The
certificate is printed and written to the run folder. Exit codes: 0 the strategy is what it says; 1 refused; 3 it says
that it is lossless and is not, or too little was drawn to tell.
"""

import sys

import hydra
from omegaconf import DictConfig

from specdec_lab.audit.command import audit_job
from specdec_lab.command import run_hydra


@hydra.main(config_path="pkg://specdec_lab.conf", config_name="audit", version_base="1.3")
def main(config: DictConfig) -> None:
    """Audit one strategy."""
    audit_job(config)


if __name__ == "__main__":
    sys.exit(run_hydra(main))
