"""Where all randomness of a run comes from: hashes of a seed and a key, equal on every device and in every order.

Nothing here has a state that one strategy could advance further than another. The target's own token at a position is
drawn with noise that depends on the request and the position alone, so that every strategy which walks by these tokens
emits one text. Decisions of an acceptance rule, and drafts, are keyed by the round as well: they are independent of
the target's tokens and of each other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Key = tuple[object, ...]
"""What identifies a draw besides the seed: question, turn, sample, position, and what the draw is for."""


class Chance(Protocol):
    """The random decisions of one round, in the order in which they are asked for; each is independent of the rest."""

    def happens(self, probability: float) -> bool:
        """Return true with this probability; never with probability 0, always with 1 or more."""
        ...

    def draw(self, law: Tensor) -> int:
        """Return an index drawn from ``[vocab]`` float64 probabilities; never one of probability 0."""
        ...


class Noise(Protocol):
    """A source of randomness: hashes when decoding, every outcome in turn when a law is enumerated."""

    def target_token(self, scores: Tensor, key: Key) -> int:
        """Return the target's own token at a position, drawn from ``softmax(scores)``, ``[vocab]``."""
        ...

    def chance(self, key: Key) -> Chance:
        """Return the decisions of one round."""
        ...

    def shared(self, vocab: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
        """Return the Gumbel noise with which ``target_token`` draws at that key, ``[vocab]``, for coupled drafts."""
        ...


@dataclass(frozen=True)
class HashedNoise:
    """Noise that is a function of seed and key."""

    seed: int

    def target_token(self, scores: Tensor, key: Key) -> int:
        """Return the Gumbel maximum (arXiv 1611.01144, section 2; shared noise as in arXiv 2408.07978)."""
        return int((scores + self.shared(scores.shape[0], key, scores.device)).argmax())

    def chance(self, key: Key) -> Chance:
        """Return decisions that are independent of every other key's."""
        return HashedChance(self.seed, key)

    def shared(self, vocab: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
        """Return standard Gumbel noise per token id, ``[vocab]``."""
        return gumbel_noise(vocab, self.seed, key, device)


@dataclass
class HashedChance:
    """Decisions numbered within their key, so that none is made with the noise of another."""

    seed: int
    key: Key
    _made: int = field(default=0, init=False)

    def happens(self, probability: float) -> bool:
        """Return true with this probability: ``u < probability``, strictly, with ``u`` in [0, 1)."""
        return self._uniform() < probability

    def draw(self, law: Tensor) -> int:
        """Return an index by inversion of the cumulative law."""
        cumulative = law.double().cumsum(0)
        at = int(torch.searchsorted(cumulative, self._uniform() * float(cumulative[-1]), right=True))
        return min(at, int(law.nonzero()[-1]))  # a sum that rounds up must not end behind the last possible token

    def _uniform(self) -> float:
        """Return the next number in [0, 1), a multiple of 2^-53."""
        digest = _digest(self.seed, (*self.key, "decision", self._made))
        self._made += 1
        return (int.from_bytes(digest, "little") >> 11) / 2**53


_MASK32 = 0xFFFFFFFF


def gumbel_noise(vocab: int, seed: int, key: Key, device: torch.device | str = "cpu") -> Tensor:
    """Return standard Gumbel noise per token id, ``[vocab]`` float32, as a hash of (seed, key, token id).

    The same integers on every device: a 64-bit key from BLAKE2b, two rounds of MurmurHash3's 32-bit finaliser over it
    and the token id, 32 bits to a uniform number in (0, 1).
    """
    digest = _digest(seed, key)
    low, high = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    mixed = _mix32(torch.arange(vocab, device=device) ^ low)
    mixed = _mix32((mixed + high) & _MASK32)
    uniform = (mixed.double() + 0.5) / 2**32
    return (-(-uniform.log()).log()).float()


def _digest(seed: int, key: Key) -> bytes:
    return hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()


def _mix32(values: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values."""
    values = ((values ^ (values >> 16)) * 0x85EBCA6B) & _MASK32
    values = ((values ^ (values >> 13)) * 0xC2B2AE35) & _MASK32
    return values ^ (values >> 16)
