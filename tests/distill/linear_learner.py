"""A small real learner for the tests of the loop: linear heads on the tiny target's last hidden state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specdec_lab.distill.batch import Batch, Example
from specdec_lab.distill.features import OnlineFeatures
from specdec_lab.distill.learner import Learner, Outcome
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.target import Target
from specdec_lab.targets.tiny import load_tiny


class LinearHeads(nn.Module):
    """One linear layer per depth, and a buffer."""

    def __init__(self, hidden: int, vocab: int, depths: int, seed: int, mixed: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.layers = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(depths))
            self.mix = nn.Linear(hidden, hidden) if mixed else nn.Identity()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.02, generator=generator)
        self.register_buffer("vocabulary", torch.arange(vocab))


class LinearLearner(Learner):
    """Head *d* predicts token *t + 1 + d* from position *t*, with cross-entropy; without labels it adds no loss.

    Args:
        dropout: on the hidden states, so that the loss depends on random numbers.
        poison: key of an example whose second head's loss is NaN.
        mixed: whether a matrix stands before the output layers.
    """

    kind = "linear"
    feature_layers = (-1,)

    def __init__(
        self, target: Target, *, dropout: float = 0.0, poison: str | None = None, seed: int = 0, mixed: bool = False
    ) -> None:
        super().__init__(target)
        self.offsets = (2, 3)
        self.head: nn.Module = LinearHeads(64, target.vocab_size, len(self.offsets), seed, mixed)
        self.dropout, self.poison = dropout, poison
        self.modes: list[bool] = []
        self.draws: list[float] = []

    def forward(self, batch: Batch) -> Outcome:
        self.modes.append(self.training)
        self.draws.append(float(torch.rand(())))
        total = torch.zeros(())
        parts: dict[str, Tensor] = {}
        hits: dict[str, Tensor] = {}
        seen: dict[str, Tensor] = {}
        assert isinstance(self.head, LinearHeads)
        for depth, (layer, offset) in enumerate(zip(self.head.layers, self.offsets, strict=True), start=1):
            labels, marked = batch.labels_at(offset)
            if not marked.any():
                continue
            states = self.head.mix(batch.features[-1][marked])
            logits = layer(F.dropout(states, self.dropout, self.training))
            loss = F.cross_entropy(logits.float(), labels[marked], reduction="sum")
            if depth == 2 and self.poison in batch.keys:
                loss = loss * float("nan")
            parts[f"head{depth}"] = loss.detach()
            hits[f"depth{depth}/top1"] = (logits.argmax(-1) == labels[marked]).sum()
            seen[f"depth{depth}"] = marked.sum()
            total = total + loss
        return Outcome(total, parts, hits, seen)

    def tables(self) -> list[nn.Module]:
        assert isinstance(self.head, LinearHeads)
        return [*self.head.layers]

    def coverage(self, batch: Batch) -> float:
        return 1.0

    def drafter(self, **settings: Any) -> AutoregressiveDrafter:
        return AutoregressiveDrafter(self.target, **settings)

    def export(self, folder: Path, provenance: Mapping[str, Any]) -> None:
        save_file(
            {name: tensor.contiguous() for name, tensor in self.head.state_dict().items()}, folder / "head.safetensors"
        )
        (folder / "provenance.json").write_text(json.dumps(provenance))


def make_examples(count: int, seed: int = 0, shift: int = 0) -> list[Example]:
    """Return texts of the ids 5 to 24 with 5 to 14 tokens; the target wrote all but the first three."""
    generator = torch.Generator().manual_seed(seed)
    texts: list[Example] = []
    for at in range(count):
        length = int(torch.randint(5, 15, (), generator=generator))
        ids = tuple(torch.randint(5, 25, (length,), generator=generator).tolist())
        texts.append(Example(f"q{at + shift}/0/0", ids, tuple(place >= 3 for place in range(length))))
    return texts


class Recorder(OnlineFeatures):
    """The target's own features; notes which examples are asked for, and may break off.

    Args:
        before: called before each batch with its number, from 0.
    """

    def __init__(self, target: Target, before: Any = lambda number: None) -> None:
        super().__init__(target, (-1,))
        self.before = before
        self.keys: list[tuple[str, ...]] = []

    def batch(self, examples: Sequence[Example]) -> Batch:
        self.before(len(self.keys))
        self.keys.append(tuple(example.key for example in examples if example.labels))
        return super().batch(examples)


@cache
def tiny() -> Target:
    """Return the tiny target on the CPU, the same one each time."""
    return load_tiny(device="cpu")
