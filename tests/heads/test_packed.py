"""Packed matrices: products of the plain ones, held once, and only where nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from head_folders import HEADS, LAYERS, kind_of, randomised, reduced
from tiny_models import CONFIGS, build
from torch import Tensor, nn
from transformers import LlamaConfig

from specdec_lab import packed as packing
from specdec_lab.decode import Request, speculative_decode
from specdec_lab.drafters.autoregressive import AutoregressiveDrafter
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.drafters.medusa import MedusaDrafter
from specdec_lab.heads.draft_lm import DraftLM
from specdec_lab.heads.formats import save_head
from specdec_lab.packed import PackedLinear, can_pack, linear, pack_linears, packed, packed_bytes
from specdec_lab.target import Target

FLAT = {1: 1.0, 512: 1.0}
"""Costs under which every node pays."""

MATRIX = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

needs_packing = pytest.mark.skipif(not can_pack(MATRIX), reason="oneDNN does not multiply bfloat16 here")


def like(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bf16_target() -> Target:
    """Return a Llama of 8 layers in bfloat16."""
    values = {**CONFIGS["llama"].to_dict(), "num_hidden_layers": LAYERS}
    return Target(build(LlamaConfig(**values)).bfloat16(), name="deep")


def decoded(target: Target, drafter: Drafter) -> tuple[list[int], int]:
    """Return an answer, and how many drafts were offered for it."""
    for progress in speculative_decode(target, drafter, [Request((5, 6, 7, 9), 24)]):
        if progress.generation is not None:
            assert progress.generation.error is None
            return list(progress.generation.output_ids), sum(one.proposed_nodes for one in progress.generation.rounds)
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
        }
    ).bfloat16()
    model["output"].weight = model["embedding"].weight
    held = sum({id(weight): weight.nbytes for weight in model.parameters()}.values())
    pack_linears(model)
    assert isinstance(model["list"][0][0], PackedLinear)  # type: ignore[index]
    assert type(model["output"]) is nn.Linear
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
    """Same bytes, lossless, and the learner's own layers keep their weights, which its next step changes."""
    target, head = bf16_target(), randomised(HEADS[name]()).eval().bfloat16()
    make = HEAD_DRAFTERS[kind_of(head)]
    save_head(head, tmp_path / "head", {})
    served, own = make(target, str(tmp_path / "head")), make(target, head)
    assert not any(isinstance(part, PackedLinear) for part in head.modules())
    parts = served.heads if isinstance(served, MedusaDrafter) else served.head
    assert not any(type(part) is nn.Linear for part in parts.modules())
    wanted, _ = decoded(target, AutoregressiveDrafter(target))
    for drafter in (served, own):
        answer, offered = decoded(target, drafter)
        assert answer == wanted
        assert offered > 0
    assert served.memory_bytes() == own.memory_bytes()


@needs_packing
@pytest.mark.parametrize("own", [False, True])
def test_a_draft_made_from_the_target_is_packed_and_the_target_is_not(own: bool):
    """It holds parts of the target, whose own layers must stay as transformers made them."""
    target = bf16_target()
    model = DraftLM(target, (0, 7), reduced(), own_embedding=own, own_output=own).eval()
    drafter = DraftModelDrafter(target, model=model, verify_ms=FLAT)
    linears = [part for part in drafter.draft.model.modules() if type(part) is nn.Linear]
    assert not linears
    assert not any(isinstance(part, PackedLinear) for part in [*target.model.modules(), *model.modules()])
    wanted, _ = decoded(target, AutoregressiveDrafter(target))
    assert decoded(target, drafter)[0] == wanted
    layers = sum(weight.nbytes for weight in layer_weights(model)) // 2  # its master weights are float32
    rows = len(reduced()) * target.hidden_size * 2
    embedding = target.vocab_size * target.hidden_size * 2 if own else 0
    assert drafter.memory_bytes()["draft_weights"] == layers + rows + embedding


def layer_weights(model: DraftLM) -> list[Tensor]:
    return [*model.layers.parameters(), *model.norm.parameters()]
