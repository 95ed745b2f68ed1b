"""A second, smaller causal LM that drafts: chains or trees, picked, drawn, or coupled to the target's noise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from specdec_lab.choices import SequenceRule, processed
from specdec_lab.cost import best_chain_length
from specdec_lab.drafters.base import DraftContext
from specdec_lab.drafters.sized import SizedDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.calibration import stated_calibration
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.draft_lm_files import is_draft_model, load_draft_model, refuse_head
from specdec_lab.heads.facts import training_tokens
from specdec_lab.heads.packed import pack_linears, packed_bytes
from specdec_lab.heads.shipped import SHIPPED, head_source
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.sampling import Processing
from specdec_lab.target import Target
from specdec_lab.targets.loading import Attention, Dtype, load_draft
from specdec_lab.tree import DraftTree, chain, root_only
from specdec_lab.verify import LAW_RULES

log = logging.getLogger(__name__)


class DraftModelDrafter(SizedDrafter):
    """Speculative decoding with a draft model (arXiv 2211.17192, 2302.01318), as chain or tree.

    The draft's cache holds committed tokens and nothing else: each draft level runs the tokens that were committed
    since the last round and the drafts so far as one tree, and only the former are kept. So there is nothing to rewind.

    What a child is depends on how the target's tokens are chosen. Greedy: the draft's most likely tokens. Sampled, with
    the rules ``rejection`` and ``block``: drawn without replacement from the draft's law, which gets the same
    temperature, cut-offs and penalties as the target's. Sampled and ``coupled``: the maxima of the draft's
    log-probabilities plus the target's own noise.

    A picked tree grows level by level: the ``width`` candidates that the draft's probabilities multiply up to the most
    get ``branches`` children each, and of all candidates the ``nodes`` best are offered, as many as the time of a
    verify forward makes worth while. A drawn tree is ``branches`` chains, offered whole, since to choose among drawn
    tokens would change the law of the rest.

    Args:
        model: hub id, folder or ``.gguf`` file of a causal LM with the target's tokenizer, or a folder that was trained
            from the target; ``shipped`` for that of the default target.
        k: deepest draft.
        branches: children of a candidate that is expanded; of drawn ones the root alone has more than one child. 1 is a
            chain.
        width: candidates that are expanded at a level of a picked tree.
        nodes: most draft tokens of a picked tree; ``None``: as many as the other settings give.
        min_probability: drafting along a path stops once the product of the draft's probabilities falls below this; a
            token that was drawn stays, and so does the likeliest of all. 0 always drafts ``k``.
        verify_ms: milliseconds of the target's verify forward by its nodes, ``{1: 35, 8: 40}``; with them a picked tree
            is cut to what is worth while. ``None`` measures them once if the tree branches.
        draft_cost: time of one draft forward over one target forward, as measured; then the depth of each round is the
            best for the acceptance seen so far in the sequence, at most ``k``. ``None`` always takes ``k``.
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
        model: str | DraftLM = SHIPPED,
        k: Annotated[int, Field(ge=1, le=64)] = 3,
        branches: Annotated[int, Field(ge=1, le=32)] = 4,
        width: Annotated[int, Field(ge=1, le=32)] = 3,
        nodes: Annotated[int, Field(ge=1, le=512)] | None = 24,
        min_probability: Annotated[float, Field(ge=0, lt=1)] = 0.04,
        verify_ms: Mapping[int, float] | None = None,
        draft_cost: Annotated[float, Field(gt=0)] | None = None,
        dtype: Dtype = "auto",
        device: str = "auto",
        attention: Attention = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        grown = branches + width * branches * (k - 1)  # candidates of all levels
        most = 1 + max(min(grown, nodes or grown), branches * k)
        super().__init__(target, max_nodes=most, verify_ms=verify_ms, sized=branches * width > 1)
        self.k, self.branches, self.width, self.nodes = k, branches, width, nodes or grown
        self.min_probability, self.draft_cost = min_probability, draft_cost
        made, facts = _made_from_target(target, model)
        self.training_tokens, self.calibration = training_tokens(facts), stated_calibration(facts, "model", model)
        self.vocabulary: DraftVocabulary | None = None  # of a draft that was made from the target
        if made is None:
            assert isinstance(model, str)
            self.draft = load_draft(target, model, dtype, device, attention, revision, trust_remote_code)
        else:
            self.draft, self.vocabulary = made.served(target), made.vocabulary
        pack_linears(self.draft.model, keep=target.model.parameters())
        used = self.draft.vocab_size if target.tokenizer is None else 1 + max(target.tokenizer.get_vocab().values())
        self.common_vocab = min(target.vocab_size, self.draft.vocab_size, used)
        self._warned = False

    @classmethod
    def check_parameters(cls, *, model: str | DraftLM, verify_ms: Mapping[int, float] | None, **others: Any) -> None:
        """Refuse an empty name, a head and times that cannot be; a model is looked at when the target is there."""
        if not model:
            raise InputError("model", model, "give a hub id, a folder or a .gguf file of a causal LM")
        if isinstance(model, str):
            refuse_head(model)
        super().check_parameters(verify_ms=verify_ms)

    def allocate(self, rows: int, tokens: int) -> None:
        """Make room in the draft's own cache, which holds one round's tree behind the committed tokens."""
        super().allocate(rows, tokens)
        limit = self.draft.max_length
        tokens = tokens if limit is None else min(tokens, limit)
        self.draft.allocate(rows, tokens, 2 * self.k + max(self.max_nodes, self.branches * self.width * self.k) + 2)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of the draft's weights and cache."""
        own = {weight.data_ptr(): weight for weight in self.draft.model.parameters()}
        for shared in self.target.model.parameters():  # embedding and output layer of a draft made from the target
            own.pop(shared.data_ptr(), None)
        weights = sum(weight.numel() * weight.element_size() for weight in own.values())
        return {"draft_weights": weights + packed_bytes(self.draft.model), "draft_kv": self.draft.kv_bytes}

    def propose(self, context: DraftContext) -> DraftTree:
        """Return one sequence's tree."""
        return self.propose_batch([context])[0]

    def propose_batch(self, contexts: Sequence[DraftContext]) -> list[DraftTree]:
        """Draft all rows level by level, each level in one forward."""
        growing: dict[int, _Growth] = {}
        for context in contexts:
            if context.state is None:
                self.draft.reset(context.row, clear=True)  # a NaN of an earlier text must not spoil this one's drafts
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
        if self.draft_cost is not None:
            depth = min(depth, best_chain_length(memory.acceptance, self.draft_cost, self.k))
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
        if self.vocabulary is not None:
            return self.vocabulary.scatter(logits, float("-inf"))
        wide = logits.new_full((logits.shape[0], self.target.vocab_size), float("-inf"))
        wide[:, : self.common_vocab] = logits[:, : self.common_vocab]
        return wide

    def likeliest(self, logits: Tensor, count: int) -> list[list[tuple[int, float]]]:
        """Return the likeliest tokens and their chances, ``[nodes][count]``, of logits ``[nodes, draft_vocab]``."""
        rows = (logits if self.vocabulary is not None else logits[:, : self.common_vocab]).float()
        best = rows.softmax(dim=-1).topk(min(count, rows.shape[-1]), dim=-1)
        ids = best.indices.cpu() if self.vocabulary is None else self.vocabulary.token_ids[best.indices.cpu()]
        return [
            [(token, chance) for token, chance in zip(tokens, chances, strict=True) if chance > 0]
            for tokens, chances in zip(ids.tolist(), best.values.tolist(), strict=True)
        ]


def _made_from_target(target: Target, model: str | DraftLM) -> tuple[DraftLM | None, Mapping[str, Any]]:
    """Return a draft that was trained from the target, and its facts; ``None`` if the model is one of its own."""
    if isinstance(model, DraftLM):
        return model, {}
    source = head_source("draft_model", model, target, field="model")
    return load_draft_model(source, target) if is_draft_model(source) else (None, {})


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
        fed: the tree that the draft runs: committed tokens that its cache lacks, then the candidates that are expanded.
        tokens: of all candidates, the root first; ``parents`` and ``reach`` go with it.
        reach: the draft's probabilities multiplied along the path.
        place: node of ``fed`` of each candidate that is run.
        laws: of the candidates whose children were drawn.
    """

    context: DraftContext
    depth: int
    fed: DraftTree
    drafter: DraftModelDrafter
    finished: bool = False
    caught_up: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [-1])
    reach: list[float] = field(default_factory=lambda: [1.0])
    place: dict[int, int] = field(default_factory=dict)
    laws: dict[int, Tensor] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    level: int = 0

    def __post_init__(self) -> None:
        randomness = self.context.randomness
        self.rule: SequenceRule = self.context.state.rule
        self.caught_up = len(self.fed)
        self.tokens, self.place = [self.fed.tokens[-1]], {0: self.caught_up - 1}
        self.drawn = not randomness.sampling.greedy and randomness.rule in LAW_RULES
        self.coupled = not randomness.sampling.greedy and not self.drawn
        self.chance = self.context.chance()

    def extend(self, logits: Tensor, drafter: DraftModelDrafter) -> None:
        """Add one level below the frontier, from the draft's logits at every node it was fed, ``[fed, vocab]``."""
        self.level += 1
        rows = logits[torch.tensor([self.place[node] for node in self.frontier], device=logits.device)]
        count = drafter.branches if self.level == 1 or not self.drawn else 1
        plain = not (self.drawn or self.coupled or self.rule.processors)
        chosen = drafter.likeliest(rows, count) if plain else self._processed(rows, count)
        calibration = drafter.calibrated(self.context)
        born: list[int] = []
        for node, children in zip(self.frontier, chosen, strict=True):
            for token, chance in children:
                reach = self.reach[node] * calibration.chance(chance, self.level)
                best = len(self.tokens) == 1  # the likeliest of all is offered, however unlikely
                if not (self.drawn or best) and reach < drafter.min_probability:
                    continue
                born.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(node)
                self.reach.append(reach)
        self._choose(born, drafter)

    def _processed(self, rows: Tensor, count: int) -> list[list[tuple[int, float]]]:
        """Return the children of each node of the frontier under the target's own processors, each with its history."""
        chosen = []
        for node, row in zip(self.frontier, rows, strict=True):
            ids = self.rule.history(self._drafts(node))
            scores = processed(self.drafter.aligned(row[None]), ids, self.rule.processors)[0]
            law = scores.double().softmax(dim=-1).cpu()
            chosen.append(self._children(scores, law, count))
            if self.drawn:
                self.laws[node] = law
        return chosen

    def _choose(self, born: Sequence[int], drafter: DraftModelDrafter) -> None:
        """Choose which of the new candidates are expanded; drawn ones all are, as far as there is hope."""
        eos_ids = drafter.target.eos_ids
        open_ones = [at for at in born if self.reach[at] >= drafter.min_probability and self.tokens[at] not in eos_ids]
        if not self.drawn:
            open_ones = sorted(open_ones, key=lambda at: -self.reach[at])[: drafter.width]
        self.finished = not open_ones or self.level == self.depth
        if self.finished:
            return
        fed_tokens, fed_parents = list(self.fed.tokens), list(self.fed.parents)
        for at in open_ones:
            self.place[at] = len(fed_tokens)
            fed_tokens.append(self.tokens[at])
            fed_parents.append(self.place[self.parents[at]])
        self.fed, self.frontier = DraftTree(tuple(fed_tokens), tuple(fed_parents)), open_ones

    def _children(self, scores: Tensor, law: Tensor, count: int) -> list[tuple[int, float]]:
        """Return distinct tokens to follow a node, each with the probability that it is right, as the draft sees it.

        With the target's own noise at hand that is a matter of the noise too: the softmax of both serves as a measure.
        """
        if self.drawn:
            rest, drawn = law.clone(), []
            while len(drawn) < count and float(rest.sum()) > 0:
                drawn.append(self.chance.draw(rest))
                rest[drawn[-1]] = 0
            return [(token, float(law[token])) for token in drawn]
        if self.coupled:
            noise = self.context.shared_noise(self.level, scores.shape[0])
            scores = scores + noise.to(scores.device)
            law = scores.double().softmax(dim=-1).cpu()
        best = scores.topk(min(count, scores.shape[0])).indices.tolist()
        return [(token, float(law[token])) for token in best if float(law[token]) > 0]

    def _drafts(self, node: int) -> list[int]:
        drafts: list[int] = []
        while node:
            drafts.append(self.tokens[node])
            node = self.parents[node]
        return drafts[::-1]

    def tree(self) -> DraftTree:
        """Return the drafts under their root, the last committed token."""
        if len(self.tokens) == 1:
            return root_only(self.tokens[0])
        if not self.drawn:
            return self.drafter.cut(self.tokens, self.parents, self.reach, self.drafter.nodes)
        nothing = torch.zeros_like(next(iter(self.laws.values())))
        laws = torch.stack([self.laws.get(node, nothing) for node in range(len(self.tokens))])
        return DraftTree(tuple(self.tokens), tuple(self.parents), laws, without_replacement=True)
