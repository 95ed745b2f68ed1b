"""A draft model made from its target's layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from heads_at_hand import every_other

from specdec_lab.drafters.draft_model import DraftModelDrafter
from specdec_lab.errors import InputError
from specdec_lab.heads.draft_lm import DraftLM, draft_from_layers
from specdec_lab.heads.draft_lm_files import is_draft_model, load_draft_model, save_draft_model
from specdec_lab.heads.vocabulary import DraftVocabulary
from specdec_lab.target import Target

IDS = torch.tensor([[5, 9, 17, 33, 65, 3]])


def whole(target: Target) -> DraftVocabulary:
    return DraftVocabulary.whole(target.vocab_size)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gemma2", "gemma3"])
@torch.inference_mode()
def test_all_layers_of_the_target_are_the_target(architecture: str, tiny_target):
    """A layer in the wrong place, a norm or a buffer left out: none of it would show in the text."""
    target: Target = tiny_target(architecture)
    copy = draft_from_layers(target, range(target.model.config.num_hidden_layers))
    assert torch.allclose(copy(input_ids=IDS).logits, target.model(input_ids=IDS).logits, atol=1e-5)


@torch.inference_mode()
def test_layers_come_in_the_order_they_are_named(tiny_target):
    target: Target = tiny_target()
    forwards, backwards = draft_from_layers(target, [0, 2]), draft_from_layers(target, [2, 0])
    assert not torch.allclose(forwards(input_ids=IDS).logits, backwards(input_ids=IDS).logits)
    layers = target.model.model.layers
    for draft, origin in ((forwards, [0, 2]), (backwards, [2, 0])):
        for copied, layer in zip(draft.model.layers, origin, strict=True):
            for mine, theirs in zip(copied.parameters(), layers[layer].parameters(), strict=True):
                assert torch.equal(mine, theirs)
                assert mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("layers", [[], [3], [-1]])
def test_layers_that_the_target_lacks_are_refused(layers: list[int], tiny_target):
    with pytest.raises(InputError) as error:
        draft_from_layers(tiny_target(), layers)
    assert error.value.field == "layers"


@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)])
@torch.inference_mode()
def test_training_and_serving_are_one_model(own: tuple[bool, bool], tiny_target, tmp_path: Path):
    """TD-16: the states that are trained on are those that the strategy drafts from, also after saving and loading."""
    target: Target = tiny_target()
    draft = DraftLM(target, [0, 2], every_other(target), *own).eval()
    for parameter in draft.parameters():
        parameter.add_(0.01)
    output = target.model.get_output_embeddings()
    assert output is not None
    rows = output.weight[draft.vocabulary.token_ids]
    expected = draft.logits(draft.states(IDS)[0, -1], rows)
    save_draft_model(draft, tmp_path / "draft", {}, torch.float32)
    for one in (draft, load_draft_model(str(tmp_path / "draft"), target)[0]):
        served = one.served(target)
        served.allocate(1, 16, 4)
        logits = served.prefill(0, IDS[0].tolist()).row_logits(0)[-1]
        assert logits.shape == (len(draft.vocabulary),)
        assert torch.allclose(logits, expected, atol=1e-4)


def test_parts_of_its_own_start_as_the_targets_and_are_trained(tiny_target):
    """A part that starts at random, or that no gradient reaches."""
    target: Target = tiny_target()
    shared, own = (DraftLM(target, [0], every_other(target), *both) for both in ((False, False), (True, True)))
    output = target.model.get_output_embeddings()
    assert output is not None
    rows = output.weight[own.vocabulary.token_ids].detach()
    loose = shared.logits(shared.states(IDS), rows)
    assert torch.allclose(own.logits(own.states(IDS), rows), loose, atol=1e-5)
    own.logits(own.states(IDS), rows).square().sum().backward()
    for part in (own.embedding, own.output):
        assert isinstance(part, torch.nn.Module)
        assert isinstance(part.weight, torch.Tensor)
        assert part.weight.grad is not None
        assert part.weight.grad.abs().sum() > 0
    assert all(weight.grad is None for weight in target.model.parameters())


def test_it_holds_nothing_of_the_target(tiny_target):
    """CF-02: embedding and output layer belong to the target and are in no checkpoint."""
    target: Target = tiny_target()
    draft = DraftLM(target, [0], whole(target))
    names = set(draft.state_dict())
    assert all(name.startswith(("layers.0.", "norm.")) for name in names)
    theirs = {parameter.data_ptr() for parameter in target.model.parameters()}
    assert not any(parameter.data_ptr() in theirs for parameter in draft.parameters())


@pytest.mark.parametrize("reduced", [False, True])
def test_a_folder_gives_the_model_back(reduced: bool, tiny_target, tmp_path: Path):
    """CF-01."""
    target: Target = tiny_target()
    draft = DraftLM(target, [0, 2], every_other(target) if reduced else whole(target))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_((parameter + 0.02).bfloat16())
    folder = tmp_path / "draft"
    save_draft_model(draft, folder, {"made_of": "noise"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever reads one file reads the other
    assert is_draft_model(str(folder))
    loaded, facts = load_draft_model(str(folder), target)
    assert facts == {"made_of": "noise"}
    assert loaded.origin == (0, 2)
    assert torch.equal(loaded.vocabulary.token_ids, draft.vocabulary.token_ids)
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


def test_a_folder_that_was_made_from_another_target_is_refused(tiny_target, tmp_path: Path):
    target: Target = tiny_target()
    folder = tmp_path / "draft"
    save_draft_model(DraftLM(target, [0], whole(target)), folder, {})
    with pytest.raises(InputError, match="made from another target") as error:
        DraftModelDrafter(tiny_target("gemma2"), model=str(folder))
    assert error.value.field == "model"


def test_a_folder_of_something_else_is_not_replaced(tiny_target, tmp_path: Path):
    """An output folder that is named by mistake keeps what it holds."""
    target: Target = tiny_target()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"thesis\.tex"):
        save_draft_model(DraftLM(target, [0], whole(target)), tmp_path, {})
    assert (tmp_path / "thesis.tex").exists()


def test_a_torn_file_is_one_sentence(tiny_target, tmp_path: Path):
    target: Target = tiny_target()
    folder = tmp_path / "draft"
    save_draft_model(DraftLM(target, [0], whole(target)), folder, {})
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InputError, match="copy the folder again"):
        load_draft_model(str(folder), target)
    assert not is_draft_model(str(tmp_path / "nothing"))
