"""Medusa: independent heads guess the next few tokens at once, and the likeliest combinations form the tree."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from specdec_lab.drafters.base import DraftContext
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.calibration import Calibration, stated_calibration
from specdec_lab.heads.facts import training_tokens
from specdec_lab.heads.formats import Kind, check_source, load_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.packed import pack_linears, packed_bytes
from specdec_lab.heads.published_trees import published_tree
from specdec_lab.heads.recurrent import SharedParts
from specdec_lab.heads.shipped import SHIPPED, head_source
from specdec_lab.heads.transitions import likeliest
from specdec_lab.rank_trees import RankTree, rank_tree, tree_from_accuracy
from specdec_lab.target import Target
from specdec_lab.tree import DraftTree

CONFIDENT, MEASURED = "confident", "measured"


class MedusaDrafter(SizedDrafter):
    """Medusa heads (arXiv 2401.10774) on the target's last hidden state.

    Head *h* guesses the token *h + 1* places after the last committed one. A path through the heads' choices is worth
    the product of their probabilities. Deviation: by default the tree is grown anew in each round from these products,
    where the paper's is static; static trees are a parameter. Heads may see the last committed token too, which the
    paper's do not (``MedusaHeads``). Heads that were trained beside ``Transitions`` guess
    together with them, so that a token's chance depends on the draft before it. Where the target's tokens are its
    likeliest ones, probabilities are taken for what training has found them to be worth
    (``specdec_lab.heads.calibration``).

    Args:
        head: folder or hub id of the heads; ``shipped`` for those of the default target.
        tree: ``confident`` grows it by the heads' own probabilities; ``measured`` is static, from the accuracy that was
            measured in training; the name of a published tree; or its paths of ranks, ``[[0],[0,0],[1]]``.
        nodes: most draft tokens of a tree that is not stated path by path.
        branches: choices of a head that can enter the tree.
        verify_ms: milliseconds of a verify forward by its nodes, which decide how many of ``nodes`` are worth while;
            ``None`` measures them on the target once. Only for ``confident``.
        revision: branch, tag or commit of a hub id.

    Attributes:
        dtype: of the heads and their output.
        output: the target's output layer as the heads read it; empty where they have their own.
    """

    def __init__(
        self,
        target: Target,
        *,
        head: str | MedusaHeads = SHIPPED,
        tree: str | list[list[int]] = CONFIDENT,
        nodes: Annotated[int, Field(ge=1, le=512)] = 24,
        branches: Annotated[int, Field(ge=1, le=64)] = 8,
        verify_ms: Mapping[int, float] | None = None,
        revision: str | None = None,
    ) -> None:
        facts: Mapping[str, Any] = {}
        source = head
        if isinstance(head, str):
            loaded, facts = load_head("medusa", head_source("medusa", head, target), target, revision=revision)
            assert isinstance(loaded, MedusaHeads)
            pack_linears(loaded)
            head = loaded
        self.heads, self.parts = head, SharedParts(target, head.vocabulary)
        self.dtype = next(head.parameters()).dtype
        self.output = torch.empty(0) if head.own_output else self.parts.drafting_output(self.dtype)
        self.training_tokens, self.calibration = training_tokens(facts), stated_calibration(facts, "head", source)
        self.branches = min(branches, len(head.vocabulary))
        self.static = self._static(tree, nodes, facts)
        most = 1 + (len(self.static.paths) if self.static else nodes)
        super().__init__(target, max_nodes=most, verify_ms=verify_ms, sized=self.static is None)
        self.nodes = nodes
        self.feature_layers = head.feature_layers
        self.token_ids: list[int] = head.vocabulary.token_ids.tolist()

    @classmethod
    def check_parameters(
        cls,
        *,
        head: str,
        tree: str | list[list[int]],
        verify_ms: Mapping[int, float] | None,
        revision: str | None,
        **others: Any,
    ) -> None:
        """Refuse a head that is none, an unknown tree and times that cannot be."""
        check_head("medusa", head, revision)
        if isinstance(tree, str) and tree not in (CONFIDENT, MEASURED):
            published_tree(tree)
        super().check_parameters(verify_ms=verify_ms)

    def _static(self, tree: str | list[list[int]], nodes: int, facts: Mapping[str, Any]) -> RankTree | None:
        if tree == CONFIDENT:
            return None
        if tree == MEASURED:
            found = tree_from_accuracy(measured_accuracy(facts)[: self.heads.heads], nodes)
        else:
            paths = published_tree(tree) if isinstance(tree, str) else tree
            found = rank_tree(paths, self.heads.heads, len(self.heads.vocabulary))
        self.branches = max(self.branches, found.branches)
        return found

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the heads and of their rows of the output layer."""
        weights = sum(weight.nbytes for weight in self.heads.parameters()) + packed_bytes(self.heads)
        if self.heads.transitions is not None:
            weights += self.heads.transitions.bytes
        rows = 0 if self.parts.is_own(self.output) else self.output.nbytes
        return {"draft_weights": weights + rows, "draft_kv": 0}

    def propose(self, context: DraftContext) -> DraftTree:
        """Return one sequence's tree."""
        return self.propose_batch([context])[0]

    @torch.inference_mode()
    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Run the heads of all rows at once."""
        messages = [context.verification for context in contexts]
        hidden = torch.stack([message.features[-1][message.path[-1]] for message in messages])  # [rows, hidden]
        hidden = hidden.to(self.dtype)
        if self.heads.root is not None:
            roots = torch.tensor([context.tokens[-1] for context in contexts], device=hidden.device)
            hidden = self.heads.begin(hidden, self.parts.embed(roots))
        logits = self.heads.logits(hidden, self.output).float()  # [rows, heads, draft_vocab]
        laws = logits.softmax(dim=-1).nan_to_num(0)  # what is no number is no chance
        if self.heads.transitions is not None:
            laws = laws.cpu()  # all of them are needed there
        best = laws.topk(self.branches, dim=-1)  # [rows, heads, branches]
        draft_ids, chances = best.indices.cpu().numpy(), best.values.cpu().numpy()
        held = chances if self.heads.transitions is None else laws.numpy()
        return [
            self._tree(context, _Guesses(self, held[row], draft_ids[row], chances[row], self.calibrated(context)))
            for row, context in enumerate(contexts)
        ]

    def _tree(self, context: DraftContext, guesses: _Guesses) -> DraftTree:
        """Put tokens in the place of ranks, or grow the tree; nothing is drafted after an EOS."""
        depth = min(self.heads.heads, context.max_depth)
        if self.static is None:
            return self._grown(context.tokens[-1], depth, guesses)
        eos_ids = self.target.eos_ids
        place: dict[tuple[int, ...], int] = {(): 0}
        made, parents, sure = [context.tokens[-1]], [-1], [1.0]
        for path in self.static.within(depth).paths:
            parent = place.get(path[:-1])
            if parent is None or (parent and made[parent] in eos_ids):
                continue
            token, chance = guesses.after(made[parent], len(path))[path[-1]]
            place[path] = len(made)
            made.append(token)
            parents.append(parent)
            sure.append(sure[parent] * chance)
        return DraftTree(tuple(made), tuple(parents), confidence=tuple(sure))

    def _grown(self, root: int, depth: int, guesses: _Guesses) -> DraftTree:
        """Return the nodes of the highest products of chances, as many as a verify forward is worth."""
        made, parents, depths, sure = [root], [-1], [0], [1.0]
        frontier: list[tuple[float, int, int, int]] = []  # (minus value, order, token, parent)
        eos_ids = self.target.eos_ids
        order = 0
        newest = 0
        while len(made) <= self.nodes:
            if depths[newest] < depth and (not newest or made[newest] not in eos_ids):
                for token, chance in guesses.after(made[newest], depths[newest] + 1):
                    heapq.heappush(frontier, (-sure[newest] * chance, order, token, newest))
                    order += 1
            if not frontier:
                break
            value, _, token, parent = heapq.heappop(frontier)
            newest = len(made)
            made.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            sure.append(-value)
        return self.cut(made, parents, sure, self.nodes)


class _Guesses:
    """What the heads guess in one round: the children of any draft."""

    def __init__(
        self,
        drafter: MedusaDrafter,
        laws: np.ndarray,
        draft_ids: np.ndarray,
        chances: np.ndarray,
        calibration: Calibration,
    ) -> None:
        self._calibration = calibration
        self._laws, self._draft_ids, self._chances = laws, draft_ids, chances
        self._transitions, self._token_ids = drafter.heads.transitions, drafter.token_ids
        self._known: dict[tuple[int | None, int], list[tuple[int, float]]] = {}

    def after(self, token: int, depth: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens after a token, at a depth from 1, with their chances, the best first."""
        pairs = self._transitions
        place = (None if pairs is None else token, depth)  # heads alone do not see it
        if place not in self._known:
            best, chances = self._draft_ids[depth - 1], self._chances[depth - 1]
            if pairs is None:
                found = list(zip(best.tolist(), chances.tolist(), strict=True))
            else:
                found = likeliest(self._laws[depth - 1], best, pairs.after(token), len(best))
            self._known[place] = [
                (self._token_ids[draft_id], self._calibration.chance(chance, depth)) for draft_id, chance in found
            ]
        return self._known[place]


def check_head(kind: Kind, head: object, revision: str | None) -> None:
    """Refuse what can be seen to be no head of that kind before a target is loaded.

    Raises:
        InputError: with the bare field.
    """
    if not isinstance(head, str) or head == SHIPPED:
        return
    if not head.strip():
        raise InputError("head", head, f"give a folder or hub id, or {SHIPPED}")
    check_source(kind, head, revision)


def measured_accuracy(facts: Mapping[str, Any]) -> list[list[float]]:
    """Return the accuracy by depth and rank that a head's training has measured.

    Raises:
        InputError: the head states none.
    """
    accuracy = facts.get("accuracy_by_rank")
    if not accuracy:
        raise InputError("tree", MEASURED, "this head states no measured accuracy; use another tree")
    return accuracy
