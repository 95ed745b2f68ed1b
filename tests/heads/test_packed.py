"""Packed matrices: products of the plain ones, held once, and only where nothing is trained."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_folders import HEADS, LAYERS, kind_of, logits, randomised, reduced
from tiny_models import CONFIGS, build
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.heads import packed as packing
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.formats import save_head
from specdec_lab.heads.medusa import MedusaHeads
from specdec_lab.heads.packed import PackedLinear, can_pack, linear, pack_linears, packed, packed_bytes
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

FLAT = {1: 1.0, 512: 1.0}
"""Costs under which every node pays."""

MATRIX = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

needs_packing = pytest.mark.skipif(not can_pack(MATRIX), reason="oneDNN does not multiply bfloat16 here")


def like(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bf16_target(tied: bool = True) -> Target:
    """Return a Llama of 8 layers in bfloat16."""
    values = {**CONFIGS["llama"].to_dict(), "num_hidden_layers": LAYERS, "tie_word_embeddings": tied}
    return Target(build(LlamaConfig(**values)).bfloat16(), name="deep")


def decoded(target: Target, drafter: Drafter) -> int:
    """Return how many drafts were offered for an answer."""
    for progress in speculative_decode(target, drafter, [Request((5, 6, 7, 9), 24)]):
        if progress.generation is not None:
            assert progress.generation.error is None
            return sum(one.proposed_nodes for one in progress.generation.rounds)
    raise AssertionError("no answer")


@needs_packing
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (8, 64), (2, 3, 64), (64,), (700, 64)])
@pytest.mark.parametrize("bias", [None, like(96, seed=2)])
def test_products_are_those_of_the_plain_matrix(shape: tuple[int, ...], bias: Tensor | None):
    layer_, x = PackedLinear(MATRIX, bias), like(*shape)
    found, wanted = layer_(x), F.linear(x, MATRIX, bias)
    assert found.shape == wanted.shape
    assert torch.allclose(found.float(), wanted.float(), atol=0.1, rtol=0.02)


@needs_packing
def test_inputs_need_not_be_contiguous():
    layer_ = PackedLinear(MATRIX)
    for x in (like(64, 9).t(), like(5, 128)[:, ::2], like(3, 4, 64)[:, 1:3]):
        assert torch.allclose(layer_(x).float(), F.linear(x, MATRIX).float(), atol=0.1, rtol=0.02)


@needs_packing
def test_what_is_no_number_stays_in_its_row():
    x = like(5, 64)
    x[2] = float("nan")
    assert PackedLinear(MATRIX)(x).isnan().any(dim=-1).tolist() == [False, False, True, False, False]


@needs_packing
def test_a_later_change_of_the_plain_matrix_does_not_reach_the_packed_one():
    plain = MATRIX.clone()
    layer_, x = PackedLinear(plain), like(2, 64)
    before = layer_(x)
    plain.zero_()
    assert torch.equal(layer_(x), before)


def test_what_cannot_be_packed_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    """float32, no element at all, and a torch or processor without the operators."""
    assert packed(MATRIX.float()).dtype == torch.float32  # type: ignore[union-attr]
    empty = MATRIX[:0]
    assert packed(empty) is empty
    monkeypatch.setattr(packing, "_has_packed", lambda: False)
    assert packed(MATRIX) is MATRIX
    model = nn.Sequential(nn.Linear(64, 96)).bfloat16()
    pack_linears(model)
    assert type(model[0]) is nn.Linear
    assert packed_bytes(model) == 0
    assert torch.equal(linear(like(2, 64), MATRIX), F.linear(like(2, 64), MATRIX))


@needs_packing
def test_only_what_pays_is_packed():
    """Other dtypes and devices have no such product; a layer of another class may do more than a product."""
    assert not can_pack(MATRIX.half())
    assert not can_pack(MATRIX.to("meta"))

    class Louder(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Louder(64, 96)).bfloat16()
    pack_linears(model)
    assert type(model[0]) is Louder


@needs_packing
def test_who_looks_at_the_matrix_finds_it():
    """Gates of some models read the dtype of their own weight, and what is saved has to be what was loaded."""
    plain = nn.Linear(64, 96).bfloat16()
    packed_one = PackedLinear(plain.weight, plain.bias)
    assert torch.equal(packed_one.weight, plain.weight)
    saved = nn.Sequential(packed_one).state_dict()
    assert sorted(saved) == ["0.bias", "0.weight"]
    assert torch.equal(saved["0.weight"], plain.weight)
    odd = like(7, 5)
    assert torch.equal(PackedLinear(odd).weight, odd)


@needs_packing
def test_a_gradient_that_would_end_there_is_refused():
    x = like(2, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        PackedLinear(MATRIX)(x)
    with torch.no_grad():
        assert PackedLinear(MATRIX)(x).shape == (2, 96)


@needs_packing
def test_plain_matrices_go_one_by_one(monkeypatch: pytest.MonkeyPatch):
    """All plain ones beside all packed ones would be twice the memory of a large draft."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
    alive = [weakref.ref(layer.weight) for layer in model]
    counts: list[int] = []
    make = PackedLinear.__init__

    def watched(self: PackedLinear, *weights: Any) -> None:
        gc.collect()
        counts.append(sum(one() is not None for one in alive))
        make(self, *weights)

    monkeypatch.setattr(PackedLinear, "__init__", watched)
    pack_linears(model)
    assert counts == [4, 3, 2, 1]


def test_operators_that_do_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch):
    """They are not part of torch's promise: what they return is looked at once before anything depends on it."""
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(len(x), self.out_features))
    packing._has_packed.cache_clear()
    try:
        assert not can_pack(MATRIX)
    finally:
        monkeypatch.undo()
        packing._has_packed.cache_clear()


@needs_packing
def test_layers_are_replaced_wherever_they_stand_but_not_those_that_are_read_elsewhere():
    """A tied embedding would be held twice."""
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([nn.ModuleList([nn.Linear(64, 96)])]),
            "embedding": nn.Embedding(96, 64),
            "output": nn.Linear(64, 96, bias=False),
            "twice": nn.Linear(64, 96, bias=False),
            "others": nn.Linear(64, 96, bias=False),
        }
    ).bfloat16()
    model["output"].weight = model["embedding"].weight
    model["again"] = model["twice"]
    held = sum({id(weight): weight.nbytes for weight in model.parameters()}.values())
    pack_linears(model, keep=model["others"].parameters())
    assert isinstance(model["list"][0][0], PackedLinear)  # type: ignore[index]
    assert all(type(model[name]) is nn.Linear for name in ("output", "twice", "again", "others"))
    assert packed_bytes(model) == 64 * 96 * 2
    assert sum(weight.nbytes for weight in model.parameters()) + packed_bytes(model) == held


PACKED_HEADS = ["medusa tied reduced", "medusa own", "eagle biased reduced", "eagle of two layers", "eagle3 reduced"]

HEAD_DRAFTERS = {
    "medusa": lambda target, head: MedusaDrafter(target, head=head, verify_ms=FLAT),
    "eagle": lambda target, head: EagleDrafter(target, head=head, verify_ms=FLAT),
    "eagle3": lambda target, head: EagleDrafter(target, head=head, kind="eagle3", verify_ms=FLAT),
}


@needs_packing
@pytest.mark.parametrize("name", PACKED_HEADS)
def test_a_head_from_a_folder_is_packed_and_one_in_training_is_not(name: str, tmp_path: Path):
    """Same bytes, same logits but for rounding; a learner keeps the layers that its next step changes."""
    target, head = bf16_target(), randomised(HEADS[name]()).eval().bfloat16()
    make = HEAD_DRAFTERS[kind_of(head)]
    save_head(head, tmp_path / "head", {})
    served, own = make(target, str(tmp_path / "head")), make(target, head)
    assert not any(isinstance(part, PackedLinear) for part in head.modules())
    parts = served.heads if isinstance(served, MedusaDrafter) else served.head
    assert not any(type(part) is nn.Linear for part in parts.modules())
    assert torch.allclose(logits(parts, target).float(), logits(head, target).float(), atol=0.1, rtol=0.05)
    for drafter in (served, own):
        assert decoded(target, drafter) > 0
    assert served.memory_bytes() == own.memory_bytes()


@needs_packing
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_draft_made_from_the_target_is_packed_and_what_is_the_targets_is_not(whole: bool, tied: bool, own: bool):
    """It holds parts of the target, which must stay as transformers made them and are no memory of its own."""
    target = bf16_target(tied)
    vocabulary = DraftVocabulary.whole(target.vocab_size) if whole else reduced()
    model = DraftLM(target, (0, 7), vocabulary, own_embedding=own, own_output=own).eval()
    drafter = DraftModelDrafter(target, model=model, verify_ms=FLAT)
    left = [part for part in drafter.draft.model.modules() if type(part) is nn.Linear]
    assert left == ([target.model.get_output_embeddings()] if whole and not own else [])
    assert not any(isinstance(part, PackedLinear) for part in [*target.model.modules(), *model.modules()])
    assert decoded(target, drafter) > 0
    layers = sum(weight.nbytes for weight in layer_weights(model)) // 2  # its master weights are float32
    rows = 0 if whole and not own else len(vocabulary) * target.hidden_size * 2
    embedding = target.vocab_size * target.hidden_size * 2 if own else 0
    assert drafter.memory_bytes()["draft_weights"] == layers + rows + embedding


def layer_weights(model: DraftLM) -> list[Tensor]:
    return [*model.layers.parameters(), *model.norm.parameters()]


@needs_packing
def test_a_draft_model_of_ones_own_is_packed(tmp_path: Path):
    """The folder of any causal LM; bytes are those of its weights."""
    target = bf16_target()
    target.model.save_pretrained(tmp_path / "draft")
    drafter = DraftModelDrafter(target, model=str(tmp_path / "draft"), verify_ms=FLAT, dtype="bfloat16")
    assert sum(isinstance(part, PackedLinear) for part in drafter.draft.model.modules()) > LAYERS
    assert drafter.memory_bytes()["draft_weights"] == target.weight_bytes
    assert decoded(target, drafter) > 0


@needs_packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("whole", [False, True])
def test_a_shared_output_layer_is_counted_where_it_is_a_copy(whole: bool, dtype: torch.dtype):
    """A float32 head on a bfloat16 target has a copy of the whole layer, which no count showed."""
    target = bf16_target()
    vocabulary = DraftVocabulary.whole(target.vocab_size) if whole else reduced()
    head = MedusaHeads(target.hidden_size, vocabulary, heads=2, blocks=1).eval().to(dtype)
    randomised(head)
    drafter = MedusaDrafter(target, head=head, verify_ms=FLAT)
    assert isinstance(drafter.output, PackedLinear) == (dtype == torch.bfloat16 and not whole)
    own = sum(weight.nbytes for weight in head.parameters())
    copied = not whole or dtype != target.dtype
    rows = len(vocabulary) * target.hidden_size * dtype.itemsize if copied else 0
    assert drafter.memory_bytes()["draft_weights"] == own + rows
