"""A second, smaller causal LM that drafts: chains or trees, picked, drawn, or coupled to the target's noise."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from specdec_lab.choices import SequenceRule, processed
from specdec_lab.cost import best_chain_length
from specdec_lab.drafters.base import DraftContext, Drafter
from specdec_lab.errors import InputError
from specdec_lab.sampling import Processing
from specdec_lab.target import Target
from specdec_lab.targets.loading import Attention, Dtype, load_draft
from specdec_lab.tree import DraftTree, chain, root_only
from specdec_lab.verify import LAW_RULES

log = logging.getLogger(__name__)


class DraftModelDrafter(Drafter):
    """Speculative decoding with a draft model (arXiv 2211.17192, 2302.01318), as chain or tree.

    The draft's cache holds committed tokens and nothing else: each draft level runs the tokens that were committed
    since the last round and the drafts so far as one tree, and only the former are kept. So there is nothing to rewind.

    What a child is depends on how the target's tokens are chosen. Greedy: the draft's most likely tokens. Sampled, with
    the rules ``rejection`` and ``block``: drawn without replacement from the draft's law, which gets the same
    temperature, cut-offs and penalties as the target's. Sampled and ``coupled``: the maxima of the draft's
    log-probabilities plus the target's own noise.

    Args:
        model: hub id, folder or ``.gguf`` file of a causal LM with the target's tokenizer.
        k: deepest draft.
        branches: children of the root; deeper nodes have one child each. 1 is a chain.
        min_probability: drafting along a path stops once the product of the draft's probabilities falls below this; a
            token that was drawn stays. 0 always drafts ``k``.
        cost: time of one draft forward over one target forward, as measured; then the depth of each round is the best
            for the acceptance seen so far in the sequence, at most ``k``. ``None`` always takes ``k``.
        dtype: as for the target; ``auto`` is the target's own.
        device: as for the target; ``auto`` is the target's own.
        attention: as for the target.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run code that comes with the draft model.
    """

    draws = True

    def __init__(
        self,
        target: Target,
        *,
        model: str,
        k: Annotated[int, Field(ge=1, le=64)] = 4,
        branches: Annotated[int, Field(ge=1, le=32)] = 1,
        min_probability: Annotated[float, Field(ge=0, lt=1)] = 0.0,
        cost: Annotated[float, Field(gt=0)] | None = None,
        dtype: Dtype = "auto",
        device: str = "auto",
        attention: Attention = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(target, max_nodes=1 + branches * k)
        self.k, self.branches, self.min_probability, self.cost = k, branches, min_probability, cost
        self.draft = load_draft(target, model, dtype, device, attention, revision, trust_remote_code)
        used = self.draft.vocab_size if target.tokenizer is None else 1 + max(target.tokenizer.get_vocab().values())
        self.common_vocab = min(target.vocab_size, self.draft.vocab_size, used)
        self._warned = False

    @classmethod
    def check_parameters(cls, *, model: str, **others: Any) -> None:
        """Refuse an empty model name; what it names is looked at when the target is there."""
        if not model:
            raise InputError("model", model, "give a hub id, a folder or a .gguf file of a causal LM")

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room in the draft's own cache, which holds one round's tree behind the committed tokens."""
        limit = self.draft.max_length
        tokens = tokens if limit is None else min(tokens, limit)
        self.draft.allocate(rows, tokens, 2 * self.k + self.max_nodes + 2)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the draft's weights and cache."""
        return {"draft_weights": self.draft.weight_bytes, "draft_kv": self.draft.kv_bytes}

    def propose(self, context: DraftContext) -> DraftTree:
        """Return one sequence's tree."""
        return self.propose_batch([context])[0]

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Draft all rows level by level, each level in one forward."""
        growing: dict[int, _Growth] = {}
        for context in contexts:
            if context.state is None:
                self.draft.reset(context.row)
                context.state = _Memory(self._rule(context))
            depth = self._depth(context)
            if depth:
                growing[context.row] = self._begin(context, depth)
        grown, waiting = dict(growing), dict(growing)
        while waiting:
            output = self.draft.forward({row: growth.fed for row, growth in waiting.items()})
            for row, growth in waiting.items():
                growth.extend(output.row_logits(row), self)
            finished = {row: growth for row, growth in waiting.items() if growth.finished}
            self.draft.commit({row: range(growth.caught_up) for row, growth in finished.items()})
            waiting = {row: growth for row, growth in waiting.items() if row not in finished}
        return [
            grown[context.row].tree() if context.row in grown else root_only(context.tokens[-1]) for context in contexts
        ]

    def _rule(self, context: DraftContext) -> SequenceRule:
        """Return the processors that shape the draft's law as they shape the target's, with the text as history."""
        processing = Processing(context.randomness.sampling, self.target)
        prompt = context.tokens[: context.prompt_length]
        return SequenceRule(processing, prompt, context.max_depth + self.k + 2, (), self.draft.device)

    def _depth(self, context: DraftContext) -> int:
        """Return how deep to draft now; 0 beyond the draft's last position."""
        memory: _Memory = context.state
        memory.learn(context)
        if max(context.tokens[self.draft.length(context.row) :]) >= self.draft.vocab_size:
            return 0  # the target has said an id that the draft has no row for, and neither can what comes after it
        limit, depth = self.draft.max_length, min(self.k, context.max_depth)
        if self.cost is not None:
            depth = min(depth, best_chain_length(memory.acceptance, self.cost, self.k))
        if limit is None or len(context.tokens) + depth - 1 <= limit:
            return depth
        if not self._warned:
            self._warned = True
            log.warning("the draft model has %d positions; longer texts go on without drafts", limit)
        return max(0, limit - len(context.tokens) + 1)

    def _begin(self, context: DraftContext, depth: int) -> _Growth:
        """Bring the draft's cache up to the text less what the first level feeds."""
        row, tokens = context.row, context.tokens
        if self.draft.length(row) == 0 and len(tokens) > 1:
            self.draft.prefill(row, tokens[:-1])
        missing = tokens[self.draft.length(row) :]
        return _Growth(context, depth, chain(missing[0], missing[1:]), self)

    def aligned(self, logits: Tensor) -> Tensor:
        """Return the draft's logits on the target's ids, ``[nodes, target vocab]``; ids without a token get -inf."""
        wide = logits.new_full((logits.shape[0], self.target.vocab_size), float("-inf"))
        wide[:, : self.common_vocab] = logits[:, : self.common_vocab]
        return wide


@dataclass
class _Memory:
    """What is remembered of one sequence: its processors, and drafts offered and accepted so far."""

    rule: SequenceRule
    offered: float = 2.0
    accepted: float = 1.0

    @property
    def acceptance(self) -> float:
        """Estimated probability that one draft is accepted, given that those before it were."""
        return min(0.98, self.accepted / self.offered)

    def learn(self, context: DraftContext) -> None:
        """Count the last round: each accepted draft was a success, the first one that was not a failure."""
        message = context.verification
        self.rule.extend(message.new_tokens)
        if message.is_prompt:
            return
        accepted = len(message.path) - 1
        self.accepted += accepted
        self.offered += accepted + (message.tree.depth > accepted)


@dataclass
class _Growth:
    """One row's tree while it is drafted.

    Attributes:
        fed: the tree that the draft runs: committed tokens that its cache lacks, then the drafts.
    """

    context: DraftContext
    depth: int
    fed: DraftTree
    drafter: DraftModelDrafter
    finished: bool = False
    caught_up: int = 0
    laws: dict[int, Tensor] = field(default_factory=dict)
    reach: dict[int, float] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=list)
    level: int = 0

    def __post_init__(self) -> None:
        randomness = self.context.randomness
        self.rule: SequenceRule = self.context.state.rule
        self.caught_up = len(self.fed)
        self.frontier, self.reach = [self.caught_up - 1], {self.caught_up - 1: 1.0}
        self.drawn = not randomness.sampling.greedy and randomness.rule in LAW_RULES
        self.coupled = not randomness.sampling.greedy and not self.drawn
        self.chance = self.context.chance()

    def extend(self, logits: Tensor, drafter: DraftModelDrafter) -> None:
        """Add one level below the frontier, from the draft's logits at every node it was fed, ``[nodes, vocab]``."""
        self.level += 1
        tokens, parents = list(self.fed.tokens), list(self.fed.parents)
        frontier: list[int] = []
        for node in self.frontier:
            ids = self.rule.history(self._drafts(node))
            scores = processed(drafter.aligned(logits[node : node + 1]), ids, self.rule.processors)[0]
            law = scores.double().softmax(dim=-1).cpu()
            for token in self._children(scores, law, node, drafter.branches if self.level == 1 else 1):
                reach = self.reach[node] * float(law[token])
                if not self.drawn and reach < drafter.min_probability:
                    continue
                child = len(tokens)
                tokens.append(token)
                parents.append(node)
                self.reach[child] = reach
                if reach >= drafter.min_probability and token not in drafter.target.eos_ids:
                    frontier.append(child)
            self.laws[node] = law
        self.fed, self.frontier = DraftTree(tuple(tokens), tuple(parents)), frontier
        self.finished = not frontier or self.level == self.depth

    def _children(self, scores: Tensor, law: Tensor, node: int, count: int) -> list[int]:
        """Return distinct tokens to follow a node."""
        if not self.drawn:
            if self.coupled:
                noise = self.context.shared_noise(self.level, scores.shape[0])
                scores = scores + noise.to(scores.device)
            best = scores.topk(min(count, scores.shape[0]))
            return [int(token) for token in best.indices if bool(scores[token].isfinite())]
        rest, drawn = law.clone(), []
        while len(drawn) < count and float(rest.sum()) > 0:
            drawn.append(self.chance.draw(rest))
            rest[drawn[-1]] = 0
        return drawn

    def _drafts(self, node: int) -> list[int]:
        return [self.fed.tokens[at] for at in self.fed.path_to(node) if at >= self.caught_up]

    def tree(self) -> DraftTree:
        """Return the drafts under their root, the last committed token."""
        shift = self.caught_up - 1
        tokens = self.fed.tokens[shift:]
        parents = (-1, *(parent - shift for parent in self.fed.parents[self.caught_up :]))
        if not self.drawn or len(tokens) == 1:
            return DraftTree(tokens, parents, confidence=tuple(self.reach[node + shift] for node in range(len(tokens))))
        nothing = torch.zeros_like(next(iter(self.laws.values())))
        laws = torch.stack([self.laws.get(node + shift, nothing) for node in range(len(tokens))])
        return DraftTree(tokens, parents, laws, without_replacement=True)
