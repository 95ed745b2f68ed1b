"""What the training loop needs of a head: one class per kind of head, in ``specdec_lab/distill/learners/``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from specdec_lab.distill.batch import Batch, Example
from specdec_lab.distill.hits import Ranked
from specdec_lab.drafters.base import Drafter
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target


@dataclass(frozen=True)
class Outcome:
    """Sums over one batch; dividing them by a number of labels is left to who knows how many there are in all.

    Attributes:
        loss: what is minimised, a scalar with its graph.
        parts: its parts by name, scalars without graph.
        hits: counts by name (``depth1/top1``, ``depth1/top5``, ...), scalars.
        seen: how many positions the ``hits`` of a name are counted over, by the part before the slash.
        ranked: the head's first choices by depth, where it is not being trained; see ``HitCounter``.
    """

    loss: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)
    hits: dict[str, Tensor] = field(default_factory=dict)
    seen: dict[str, Tensor] = field(default_factory=dict)
    ranked: dict[int, Ranked] = field(default_factory=dict)


class Learner(nn.Module, ABC):
    """A head with its loss. ``forward(batch)`` returns an ``Outcome``.

    A subclass takes the target, then ``counts`` (how often each token id is a label in the training data, ``[vocab]``,
    from which a reduced draft vocabulary is chosen), then plain keyword parameters; it is instantiated from
    ``conf/head/<kind>.yaml``.

    The head is the only registered submodule, at ``head``: its parameters are what is trained and saved. Frozen parts
    of the target are reached through ``target``, which is kept outside of the module's own registry.

    Attributes:
        kind: name of the head's configuration and of the strategy that drafts with it.
        feature_layers: hidden states of the target that a batch has to bring.
        vocabulary: what the head can draft.
        context_vocab: whether it can also draft what the text holds already.
        whole_start: whether another head of its kind holds all that it trains.
        shardable: whether its parameters may be replaced by shards of them.
        offsets: per depth, how many tokens after position *t* the label lies that is predicted there.
    """

    kind: str
    feature_layers: tuple[int, ...]
    offsets: tuple[int, ...]
    vocabulary: DraftVocabulary
    head: nn.Module
    context_vocab: bool = False
    whole_start: bool = True
    shardable: bool = True

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = (target,)  # in a tuple: its weights are neither trained nor saved

    @property
    def target(self) -> Target:
        """The teacher."""
        return self._target[0]

    def count_in(self, examples: Sequence[Example]) -> None:
        """Take from the texts to be learnt what the head keeps of them beside its weights; by default nothing."""

    def tables(self) -> list[nn.Module]:
        """Return the embeddings and output layers of the head's own, whose weights have a row per token."""
        return []

    @abstractmethod
    def forward(self, batch: Batch) -> Outcome:
        """Return the sums of the losses over a batch's labels."""

    @abstractmethod
    def coverage(self, batch: Batch) -> float:
        """Return the share of a batch's labels that can be drafted."""

    @abstractmethod
    def drafter(self, **settings: Any) -> Drafter:
        """Return the strategy that drafts with the head as it is now, for measuring it in the engine."""

    def begin_at(self, head: nn.Module) -> None:
        """Take over the weights of another head of the same kind and shape.

        Raises:
            RuntimeError: it has other weights.
        """
        self.head.load_state_dict(head.state_dict())

    def serving(self) -> AbstractContextManager[None]:
        """Return the context in which the target decodes as it will with the exported head; most leave it as it is."""
        return nullcontext()

    @abstractmethod
    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        """Write the head as a folder that the strategy loads (``drafter.NAME.head=FOLDER``)."""
