"""What a strategy sees and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec_lab.noise import Chance, Key, Noise
from specdec_lab.sampling import SamplingParams
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree
from specdec_lab.verify import Acceptance, RuleName


@dataclass(frozen=True)
class Verification:
    """What the target said about the last tree: the only message that a drafter ever gets.

    The first message of a sequence is its prompt, a chain that was accepted in full (``is_prompt``): then ``logits``
    holds the last row only, ``[1, vocab]``, and ``features`` one row per prompt token.

    Attributes:
        tree: the tree that was checked.
        path: accepted nodes from the root downwards, root included, as far as they were committed.
        next_token: the last committed token, which is the root of the next tree.
        logits: the target's raw logits, ``[nodes, vocab]``; node *i*'s row predicts the token after node *i*.
        features: hidden states per layer that the drafter asked for, ``{layer: [nodes, hidden]}``.
    """

    sequence_id: int
    is_prompt: bool
    tree: DraftTree
    path: tuple[int, ...]
    next_token: int
    logits: Tensor
    features: dict[int, Tensor]

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens that this message added to the sequence, in order."""
        accepted = () if self.is_prompt else tuple(self.tree.tokens[node] for node in self.path[1:])
        return (*accepted, self.next_token)


@dataclass(frozen=True)
class Randomness:
    """What a strategy needs in order to draw drafts.

    Attributes:
        sampling: how the target's tokens are chosen; a draft that is to be accepted is drawn alike.
        rule: the acceptance rule: ``coupled`` wants deterministic children drawn with ``shared_noise``, others
            children drawn with ``chance`` and their ``draft_probs``.
        noise: where randomness comes from.
        key: of the sequence's noise.
    """

    sampling: SamplingParams
    rule: RuleName
    noise: Noise
    key: Key


@dataclass
class DraftContext:
    """One sequence as a drafter sees it in one round.

    Attributes:
        sequence_id: unique within a run of the loop.
        row: the cache row that the sequence occupies; rows are reused when a sequence ends.
        tokens: every committed token, prompt included; ``tokens[-1]`` is the root of the tree to propose. Read only.
        prompt_length: how many of ``tokens`` belong to the prompt.
        verification: the last message about this sequence.
        max_depth: drafts deeper than this could not be committed any more (budget, position limit); at least 1.
        randomness: what a strategy draws with, if it draws.
        state: the drafter's own memory of this sequence, ``None`` at first; it ends with the sequence.
    """

    sequence_id: int
    row: int
    tokens: list[int]
    prompt_length: int
    verification: Verification
    max_depth: int
    randomness: Randomness
    state: Any = None

    def chance(self) -> Chance:
        """Return this round's random decisions, for drafts that are verified with their ``draft_probs``.

        They are independent of the target's tokens and of what accepts the drafts.
        """
        return self.randomness.noise.chance((*self.randomness.key, "draft", len(self.tokens)))

    def shared_noise(self, depth: int, vocab: int) -> Tensor:
        """Return the Gumbel noise with which the target will draw the token at a depth, ``[vocab]``; 1 is the first.

        A coupled draft is the maximum of the draft's own log-probabilities plus this noise: the closer the two laws,
        the more often it is the target's token too (arXiv 2408.07978).
        """
        return self.randomness.noise.shared(vocab, (*self.randomness.key, len(self.tokens) + depth - 1))


class Drafter(ABC):
    """A draft strategy: proposes a tree of candidate tokens for each sequence.

    A subclass takes the target first, then plain keyword parameters, and is instantiated from
    ``conf/drafter/<name>.yaml``. Per-sequence memory lives in ``DraftContext.state``, never on the drafter.

    Attributes:
        feature_layers: indices into the target's hidden states (as transformers counts them: 0 is the embedding,
            -1 the last, after the final norm) that the strategy wants with every message.
        lossless: whether the output law stays that of the target; a strategy that bends it must say so.
        draws: whether children are drawn at random when the target's tokens are; then a tree without ``draft_probs`` is
            refused under the rules that need them, since it would be verified as if it were deterministic.
        training_tokens: labels that the strategy's weights were trained on, each as often as it was seen; ``None``
            without weights, or where they do not say.
        max_nodes: an upper bound of the tree's size, root included; the target's cache keeps that much room.
    """

    feature_layers: tuple[int, ...] = ()
    lossless: bool = True
    draws: bool = False
    training_tokens: int | None = None

    def __init__(self, target: Target, *, max_nodes: int) -> None:
        self.target = target
        self.max_nodes = max_nodes

    @classmethod  # noqa: B027 (empty because most strategies have nothing to add)
    def check_parameters(cls, **parameters: Any) -> None:
        """Refuse parameters that are fine one by one but not together; called before a target is loaded.

        Args:
            parameters: every parameter but the target, by name, of the annotated types.

        Raises:
            InputError: with the parameter's bare name as its field.
        """

    @abstractmethod
    def propose(self, context: DraftContext) -> DraftTree:
        """Return a tree rooted at ``context.tokens[-1]``, at most ``context.max_depth`` deep."""

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Return one tree per context; a strategy that runs a network overrides this to run it once."""
        return [self.propose(context) for context in contexts]

    def allocate(self, rows: int, tokens: int) -> None:  # noqa: B027 (empty because most strategies have no cache)
        """Make room for sequences of ``tokens`` tokens in ``rows`` cache rows; called before each run of the loop.

        Raises:
            NoRoomError: there is not enough memory.
        """

    def lossless_under(self, acceptance: Acceptance) -> bool:
        """Return whether the target's law is kept under an acceptance rule; without drafts there is nothing to bend."""
        return self.lossless and (acceptance.lossless or self.max_nodes == 1)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that the strategy holds: ``draft_weights`` and ``draft_kv``."""
        return {"draft_weights": 0, "draft_kv": 0}
