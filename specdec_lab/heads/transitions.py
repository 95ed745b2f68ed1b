"""Which tokens follow which: what Medusa heads, which guess each token alone, do not know of each other's guesses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec_lab.heads.vocabulary import DraftVocabulary

PRIOR = 1.0
"""Pairs by which every token is taken to have been followed as tokens are anywhere."""


@dataclass(frozen=True)
class Followers:
    """What follows one token.

    Attributes:
        draft_ids: seen after it, ``[followers]``.
        factors: by which each one's probability is multiplied, ``[followers]``.
        other: by which that of any other one is.
    """

    draft_ids: np.ndarray
    factors: np.ndarray
    other: float


class Transitions:
    """Factors for the probabilities of a next token, given the one before.

    A token's factor is ``(P(token | the one before) / P(token)) ** weight``, from counts of pairs in the target's own
    texts, smoothed towards 1. A head's law times these factors, and normalised again, is the law of the head and of the
    pairs as two experts (n-gram rescoring of parallel drafts: arXiv 2404.09221).

    Args:
        previous: target ids, ascending, ``[pairs]``.
        following: draft ids, ascending for each of the former, ``[pairs]``.
        counts: how often the one followed the other, at least 1, ``[pairs]``.
        vocabulary: of the draft ids.
        weight: what the ratio is raised to.

    Raises:
        ValueError: pairs out of order, twice, outside of the vocabularies, or without a count.
    """

    def __init__(
        self, previous: Tensor, following: Tensor, counts: Tensor, vocabulary: DraftVocabulary, weight: float
    ) -> None:
        self.previous, self.following, self.counts = (part.cpu().int() for part in (previous, following, counts))
        self.vocabulary, self.weight = vocabulary, weight
        size = len(vocabulary)
        if not (self.previous.shape == self.following.shape == self.counts.shape and self.counts.dim() == 1):
            raise ValueError("pairs need as many first tokens, second tokens and counts")
        keys = self.previous.long() * size + self.following
        for part, end in ((self.previous, vocabulary.target_vocab), (self.following, size)):
            if len(part) and (int(part.min()) < 0 or int(part.max()) >= end):
                raise ValueError(f"pairs hold ids outside of 0 to {end - 1}")
        if bool((keys[1:] <= keys[:-1]).any()) or bool((self.counts < 1).any()):
            raise ValueError("pairs have to be ascending and distinct, with a count of at least 1")
        seen = self.counts.double()
        shares = torch.full((size,), 0.5, dtype=torch.double).index_add_(0, self.following.long(), seen)
        shares /= shares.sum()
        after = torch.zeros(vocabulary.target_vocab, dtype=torch.double).index_add_(0, self.previous.long(), seen)
        own = shares[self.following.long()]
        ratio = (seen + PRIOR * own) / (after[self.previous.long()] + PRIOR) / own
        self._factors = (ratio**weight).float()  # [pairs]
        self._less_one = (weight * ((seen - 1 + PRIOR * own) / (seen + PRIOR * own)).log()).float()  # [pairs]
        self._other = ((PRIOR / (after + PRIOR)) ** weight).float()  # [target_vocab]
        self._starts = torch.searchsorted(self.previous, torch.arange(vocabulary.target_vocab + 1, dtype=torch.int32))
        self._of_followers = (self.following.numpy().astype(np.int64), self._factors.numpy())
        self._bounds, self._others = self._starts.tolist(), self._other.tolist()

    @classmethod
    def counted(
        cls, texts: Iterable[tuple[Sequence[int], Sequence[bool]]], vocabulary: DraftVocabulary, weight: float
    ) -> Transitions:
        """Count the pairs of texts whose second token is marked and in the vocabulary.

        Args:
            texts: ids and marks of each one, both ``[tokens]``.
        """
        found = [torch.zeros(0, dtype=torch.long)]
        for ids, marks in texts:
            tokens = torch.tensor(ids)
            following = vocabulary.draft_ids(tokens[1:])
            kept = torch.tensor(marks, dtype=torch.bool)[1:] & (following >= 0)
            found.append(tokens[:-1][kept] * len(vocabulary) + following[kept])
        keys, counts = torch.cat(found).unique(return_counts=True)
        return cls(keys // len(vocabulary), keys % len(vocabulary), counts, vocabulary, weight)

    @property
    def bytes(self) -> int:
        """Bytes of the pairs and their factors."""
        held = (self.previous, self.following, self.counts, self._factors, self._less_one, self._other, self._starts)
        return sum(part.nbytes for part in held)

    def __len__(self) -> int:
        return len(self.previous)

    def after(self, token: int) -> Followers:
        """Return what follows a token of the target."""
        first, last = self._bounds[token], self._bounds[token + 1]
        draft_ids, factors = self._of_followers
        return Followers(draft_ids[first:last], factors[first:last], self._others[token])

    def log_factors(self, previous: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the logarithms of the factors, less that of what was never seen there, which no law depends on.

        Args:
            previous: target ids, ``[places]``.
            counted: draft ids that follow in the texts that were counted, -1 where none does, ``[places]``: each pair
                is left out of its own count, or a training would take what it has seen once for what is always so.

        Returns:
            ``[places, draft_vocab]``, float32, on the device of the ids.
        """
        device, tokens = previous.device, previous.long()
        following, factors, other, starts = (
            part.to(device) for part in (self.following, self._factors, self._other, self._starts)
        )
        first, counts = starts[tokens], starts[tokens + 1] - starts[tokens]
        place = torch.arange(len(tokens), device=device).repeat_interleave(counts)
        pair = torch.arange(len(place), device=device) - (counts.cumsum(0) - counts)[place] + first[place]
        found = (factors[pair] / other[tokens[place]]).log()
        if counted is not None:
            found = found + self._less_one.to(device)[pair] * (following[pair] == counted[place])
        values = torch.zeros(len(tokens), len(self.vocabulary), device=device)
        values[place, following[pair].long()] = found
        return values


def likeliest(law: np.ndarray, best: np.ndarray, followers: Followers, count: int) -> list[tuple[int, float]]:
    """Return the likeliest draft ids under a head's law times the factors, with their probabilities, the best first.

    Args:
        law: the head's, ``[draft_vocab]``.
        best: its likeliest draft ids, ``[ranked]``, at least ``count``: what has never followed gains less than what
            has, so of these no other can be among the likeliest.
        followers: of the token before.
        count: most that are wanted.
    """
    held = law[followers.draft_ids]
    total = float((held * followers.factors).sum()) + followers.other * max(0.0, 1.0 - float(held.sum()))
    others = best[~np.isin(best, followers.draft_ids, assume_unique=True)]
    draft_ids = np.concatenate((followers.draft_ids, others))
    values = np.concatenate((held * followers.factors, law[others] * followers.other))
    if len(values) > count:
        some = np.argpartition(-values, count - 1)[:count]
        draft_ids, values = draft_ids[some], values[some]
    order = np.lexsort((draft_ids, -values))
    return list(zip(draft_ids[order].tolist(), (values[order] / total).tolist(), strict=True))
