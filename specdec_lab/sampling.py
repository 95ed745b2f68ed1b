"""From raw logits to the token that the target chooses at a node.

The choice at a position depends on nothing but the logits there and a key: greedy decoding takes the first maximum,
sampling takes the maximum of processed logits plus Gumbel noise that is a hash of the key. So every strategy that
reaches a position makes the same choice there, and with one seed all of them emit one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_lab.errors import InputError, NonFiniteLogitsError
from specdec_lab.target import TargetOutput

LOWEST_TEMPERATURE = 1e-6
"""Below this, logits divided by the temperature come near the end of float32; 0 takes the maximum without dividing."""


@dataclass(frozen=True)
class SamplingParams:
    """How the target's next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; ``None`` keeps all.
        top_p: keep the smallest set of tokens with at least this probability; ``None`` keeps all.
        min_p: keep tokens with at least this share of the top token's probability; ``None`` keeps all.
        seed: of the noise; one seed gives one text whichever strategy drafts.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < float("inf")):
            remedy = f"give 0 (greedy) or a finite number of at least {LOWEST_TEMPERATURE:g}"
            raise InputError("sampling.temperature", self.temperature, remedy)
        if self.top_k is not None and self.top_k < 1:
            raise InputError("sampling.top_k", self.top_k, "give a whole number of at least 1, or null")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError("sampling.top_p", self.top_p, "give a number above 0 and at most 1, or null")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError("sampling.min_p", self.min_p, "give a number from 0 to 1, or null")

    @property
    def greedy(self) -> bool:
        """Whether the first maximum is taken and no noise is drawn."""
        return self.temperature == 0

    def processors(self) -> LogitsProcessorList:
        """Return transformers' own processors in the order in which ``generate`` applies them."""
        processors = LogitsProcessorList()
        if self.temperature not in (0, 1):
            processors.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            processors.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            processors.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            processors.append(MinPLogitsWarper(float(self.min_p)))
        return processors


NON_FINITE = "the target returned NaN or infinite logits; check its dtype, weights and logits processors"


class TokenChooser:
    """Chooses the target's token at any node of a round."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling, self._processors = sampling, sampling.processors()

    @property
    def samples(self) -> bool:
        """Whether the choice depends on the node's history and noise."""
        return not self._sampling.greedy

    def round(self, output: TargetOutput) -> dict[int, Callable[[int, Sequence[int], tuple[object, ...]], int]]:
        """Return, per cache row, the function ``(node, history, noise key) -> token``.

        Greedy takes all rows' maxima at once. Sampling processes a node only when the walk visits it, since top-p
        costs about 4 ms a node at a vocabulary of 49 k on a CPU.

        Raises (from the returned function):
            NonFiniteLogitsError: the chosen token's logit is NaN or infinite.
        """
        if self._sampling.greedy:
            chosen, finite = greedy_tokens(output.logits)
            return {row: partial(_looked_up, chosen[at], finite[at]) for row, at in output.at.items()}
        return {row: partial(self._draw, output.row_logits(row)) for row in output.at}

    def _draw(self, logits: Tensor, node: int, history: Sequence[int], key: tuple[object, ...]) -> int:
        return sampled_token(logits[node], history, self._processors, self._sampling.seed, (*key, len(history)))


def _looked_up(
    tokens: Sequence[int], finite: Sequence[bool], node: int, history: Sequence[int], key: tuple[object, ...]
) -> int:
    if not finite[node]:
        raise NonFiniteLogitsError(NON_FINITE)
    return tokens[node]


def greedy_tokens(logits: Tensor) -> tuple[list[list[int]], list[list[bool]]]:
    """Return the first maximum of each node of ``[rows, nodes, vocab]``, and whether its logit is finite."""
    wide = logits.float()  # argmax over bfloat16 takes 3.6 times as long on a CPU
    tokens = wide.argmax(dim=-1)  # [rows, nodes]
    finite = wide.gather(-1, tokens[..., None])[..., 0].isfinite()
    chosen, good = torch.stack((tokens, finite.long())).tolist()  # the round's one device synchronisation
    return chosen, [[bool(flag) for flag in row] for row in good]


def sampled_token(
    logits: Tensor, history: Sequence[int], processors: LogitsProcessorList, seed: int, key: tuple[object, ...]
) -> int:
    """Draw one token by the Gumbel maximum (arXiv 1611.01144, section 2; shared noise as in arXiv 2408.07978).

    Args:
        logits: one raw row, ``[vocab]``; it is not edited.
        history: every token before the one to draw, for processors that look at it.
        key: what identifies the draw besides the seed: question, turn, sample, position.

    Raises:
        NonFiniteLogitsError: the row holds NaN, or no token is left with a finite logit.
    """
    ids = torch.tensor([list(history)], device=logits.device)
    raw = cast(torch.FloatTensor, logits.float()[None].clone())  # [1, vocab]
    scores = processors(cast(torch.LongTensor, ids), raw)[0]  # [vocab]
    noisy = scores + gumbel_noise(scores.shape[0], seed, key, scores.device)
    token = int(noisy.argmax())
    if not bool(noisy[token].isfinite()):
        raise NonFiniteLogitsError(NON_FINITE)
    return token


_MASK32 = 0xFFFFFFFF


def gumbel_noise(vocab: int, seed: int, key: tuple[object, ...], device: torch.device | str = "cpu") -> Tensor:
    """Return standard Gumbel noise per token id, ``[vocab]`` float32, as a hash of (seed, key, token id).

    The same integers on every device: a 64-bit key from BLAKE2b, two rounds of MurmurHash3's 32-bit finaliser over it
    and the token id, 32 bits to a uniform number in (0, 1).
    """
    digest = hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()
    low, high = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    mixed = _mix32(torch.arange(vocab, device=device) ^ low)
    mixed = _mix32((mixed + high) & _MASK32)
    uniform = (mixed.double() + 0.5) / 2**32
    return (-(-uniform.log()).log()).float()


def _mix32(values: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & _MASK32
    values = ((values ^ (values >> 13)) * 0xC2B2AE35) & _MASK32
    return values ^ (values >> 16)
