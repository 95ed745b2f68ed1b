"""Teaching a draft head to copy: a group of its query heads looks where the text has said the next token before.

Induction heads (arXiv 2209.11895) find an earlier place of the current token and read what came after it. A recurrent
head of one layer can hold one, since it sees at every earlier position the target's state and the token that followed;
a draft model needs two layers, the first of which brings along the token before. From scarce data they do not find
that out by themselves; told where to look, and which token to bring back, they do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_lab.distill.batch import ahead


def copy_sources(ids: Tensor, supervised: Tensor) -> Tensor:
    """Return from where a recurrent head could copy its first label, ``[rows, tokens, tokens]``, bool.

    At ``[row, t, j]``: token *j* is the token after *t*, at which the head is, and the token after *j* is the label
    that it drafts there, token *t + 2*; *j* is not after *t*.

    Args:
        ids: ``[rows, tokens]``.
        supervised: tokens that are labels, ``[rows, tokens]``, bool.
    """
    following, labels = ahead(ids, 1), ahead(ids, 2)
    same = following[:, :, None] == ids[:, None, :]
    right = labels[:, :, None] == following[:, None, :]
    return (same & right & ahead(supervised, 2)[:, :, None]).tril()


def label_sources(ids: Tensor, supervised: Tensor) -> Tensor:
    """Return from where a language model could copy its label, ``[rows, tokens, tokens]``, bool.

    At ``[row, t, j]``: token *j* is the label, token *t + 1*, and the token before *j* is token *t*; *j* is not after
    *t*.
    """
    sources = copy_sources(ids, supervised)  # one token later on both axes
    return F.pad(sources[:, :-1, :-1], (1, 0, 1, 0))


def recurrent_sources(ids: Tensor, supervised: Tensor, layers: int) -> dict[int, Tensor]:
    """Return where each layer of a recurrent head is to look, by its index, ``[rows, tokens, tokens]`` each.

    The last one copies. Where it is not the only one, the first brings along the token before, so that the last need
    not read it out of the target's state.
    """
    before = {0: previous_sources(supervised)} if layers > 1 else {}
    return before | {layers - 1: copy_sources(ids, supervised)}


def previous_sources(supervised: Tensor) -> Tensor:
    """Return the token before at every position but the first that has a label, ``[rows, tokens, tokens]``, bool."""
    tokens = supervised.shape[1]
    before = torch.eye(tokens, dtype=torch.bool, device=supervised.device).roll(-1, dims=1).tril(-1)
    return before & ahead(supervised, 1)[:, :, None]


def copy_loss(query: Tensor, key: Tensor, sources: Tensor) -> Tensor:
    """Return minus the log of the attention that falls on a source, in nats: mean of the heads, sum of the positions.

    Positions without a source count nothing.

    Args:
        query: of all heads, ``[rows, heads, tokens, head_dim]``; the last group of them is to copy.
        key: ``[rows, kv_heads, tokens, head_dim]``.
        sources: see ``copy_sources``, ``[rows, tokens, tokens]``.
    """
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    query, key = query[:, -groups:], key[:, -1:]
    scores = (query @ key.transpose(-1, -2)).float() * query.shape[3] ** -0.5  # [rows, heads, tokens, tokens]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    copied = scores.masked_fill(~sources[:, None], -torch.inf)
    some = sources.any(dim=-1)[:, None].expand(scores.shape[:3])  # [rows, heads, tokens]
    missed = scores[some].logsumexp(dim=-1) - copied[some].logsumexp(dim=-1)
    return missed.sum() / query.shape[1]


def carried_states(value: Tensor, output: Tensor) -> Tensor:
    """Return what the last group of query heads adds to the state if all of it looks at one position.

    Args:
        value: ``[rows, kv_heads, tokens, head_dim]``.
        output: the weight that turns all heads' outputs into a state, ``[hidden, query_heads * head_dim]``.

    Returns:
        ``[rows, tokens, hidden]``, for each position that may be looked at.
    """
    kv_heads, head_dim = value.shape[1], value.shape[3]
    groups = output.shape[1] // (kv_heads * head_dim)
    last = output[:, -groups * head_dim :].view(-1, groups, head_dim).sum(dim=1)  # [hidden, head_dim]
    return F.linear(value[:, -1], last.to(value.dtype))


def carried(tokens: Tensor, supervised: Tensor) -> Tensor:
    """Return the positions whose value is compared with the token that it is to carry, ``[rows, tokens]``, bool.

    Every fourth, as each costs a row of the output layer, and only those whose token is a label and can be drafted.

    Args:
        tokens: draft id that each position is to carry, -1 where the draft vocabulary lacks it, ``[rows, tokens]``.
        supervised: whether it is a label, ``[rows, tokens]``, bool.
    """
    return supervised & (tokens >= 0) & (torch.arange(tokens.shape[1], device=tokens.device) % CARRIED_EVERY == 0)


CARRIED_EVERY = 4


class CopyWatch:
    """Sees queries, keys and values of a language model's layers, and adds up how far the queries are from a copy.

    The last group of query heads of the first layer is to look at the token before, that of the last layer at the
    places of ``label_sources``.

    Attributes:
        loss: see ``copy_loss``, of both layers.
        value: of the last layer, ``[rows, kv_heads, tokens, head_dim]``; empty before it was seen.
    """

    def __init__(self, ids: Tensor, supervised: Tensor, layers: int) -> None:
        self.loss = torch.zeros((), device=ids.device)
        self.value = torch.empty(0, device=ids.device)
        self._sources = {0: previous_sources(supervised), layers - 1: label_sources(ids, supervised)}
        self._last = layers - 1

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Look at one layer, ``query [rows, heads, tokens, head_dim]``, ``key [rows, kv_heads, tokens, head_dim]``."""
        if layer == self._last:
            self.value = value
        if layer in self._sources:
            self.loss = self.loss + copy_loss(query, key, self._sources[layer])
