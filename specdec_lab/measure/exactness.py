"""How often low precision keeps the promise of identical text, and how far logits move: decision 0004."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.target import Exact, Target
from specdec_lab.tree import DraftTree, chain, from_paths, root_only


class NoisyOracleDrafter(Drafter):
    """Drafts the baseline's own answer with wrong tokens mixed in, as chains or trees of random size.

    Args:
        answers: the baseline's output per prompt.
        shape: ``chain``, or ``tree`` with up to three branches per proposal.
        miss_rate: chance that a drafted token is a random one.
    """

    def __init__(
        self,
        target: Target,
        answers: dict[tuple[int, ...], Sequence[int]],
        shape: str,
        seed: int,
        miss_rate: float = 0.2,
    ) -> None:
        super().__init__(target, max_nodes=16)
        self._answers, self._shape, self._miss_rate = answers, shape, miss_rate
        self._random = random.Random(seed)

    def propose(self, context: DraftContext) -> DraftTree:
        """Return a tree whose branches follow the baseline's answer for a while."""
        prompt = tuple(context.tokens[: context.prompt_length])
        ahead = self._answers[prompt][len(context.tokens) - context.prompt_length :]
        depth = min(self._random.randint(1, 8), context.max_depth, len(ahead))
        branches = 1 if self._shape == "chain" else 3
        paths = [[self._drafted(token) for token in ahead[:depth]] for _ in range(branches)]
        return from_paths(context.tokens[-1], paths, self.max_nodes)

    def _drafted(self, token: int) -> int:
        return token if self._random.random() >= self._miss_rate else self._random.randrange(self.target.vocab_size)


@dataclass(frozen=True)
class ExactnessCount:
    """Answers compared with the baseline's, token by token."""

    mode: str
    shape: str
    compared: int
    identical: int


def measure_identity(
    load: Callable[[Exact], Target],
    prompts: Sequence[tuple[int, ...]],
    max_new_tokens: int,
    on_answer: Callable[[], None] = lambda: None,
) -> list[ExactnessCount]:
    """Count identical answers of chains and trees, with and without fixed shapes."""
    counts: list[ExactnessCount] = []
    modes: tuple[Exact, ...] = ("off", "fixed_shape")
    for mode in modes:
        target = load(mode)
        baseline = AutoregressiveDrafter(target)
        answers = {}
        for prompt in prompts:
            answers[prompt] = _answer(target, baseline, prompt, max_new_tokens)
            on_answer()
        for shape in ("chain", "tree"):
            drafter = NoisyOracleDrafter(target, answers, shape, seed=0)
            identical = 0
            for prompt in prompts:
                identical += _answer(target, drafter, prompt, max_new_tokens) == answers[prompt]
                on_answer()
            counts.append(ExactnessCount(mode, shape, len(prompts), identical))
    return counts


def measure_margin_move(target: Target, prompts: Sequence[tuple[int, ...]], nodes: int = 16) -> list[float]:
    """Return, per prompt, how far the gap between the two best tokens moves with the number of nodes per forward.

    The last ``nodes`` tokens of a prompt go through one forward and then one at a time; the largest difference of the
    top-2 margin, in logits, bounds the margins at which rounding alone can turn an argmax.
    """
    moves = []
    for prompt in prompts:
        head, tail = prompt[:-nodes], prompt[-nodes:]
        target.allocate(1, len(prompt), nodes)
        target.prefill(0, head)
        together = target.forward({0: chain(tail[0], tail[1:])}).row_logits(0).float()
        singly = []
        for token in tail:
            singly.append(target.forward({0: root_only(token)}).row_logits(0)[0].float())
            target.commit({0: (0,)})
        values, best = torch.stack(singly).topk(2, dim=-1)  # [nodes, 2]
        moved = together.gather(-1, best) - values
        moves.append((moved[:, 0] - moved[:, 1]).abs().max().item())
    return moves


def _answer(target: Target, drafter: Drafter, prompt: tuple[int, ...], max_new_tokens: int) -> tuple[int, ...]:
    (*_, last) = speculative_decode(target, drafter, [Request(prompt, max_new_tokens)])
    assert last.generation is not None
    return last.generation.output_ids


def exactness_table(counts: Sequence[ExactnessCount]) -> Table:
    """Render the counts."""
    table = Table("exact", "drafts", "identical answers", title="Answers equal to the baseline's, token by token")
    for count in counts:
        table.add_row(count.mode, count.shape, f"{count.identical} of {count.compared}")
    return table
