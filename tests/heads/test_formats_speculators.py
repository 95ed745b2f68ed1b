"""The speculators package opens what is written here, and what it saves is opened here; only where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from head_folders import FACTS, HEADS, HIDDEN, VOCAB, attend, deep_target, randomised
from safetensors.torch import load_file

from specdec_lab.heads.eagle3 import Eagle3Head
from specdec_lab.heads.formats import load_head, save_head
from specdec_lab.heads.recurrent import SharedParts

pytestmark = pytest.mark.slow  # it loads a package that takes a while to import

TOKENS = 9


def small(name: str) -> Eagle3Head:
    head = randomised(HEADS[name]()).eval()
    assert isinstance(head, Eagle3Head)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.sub_(0.3).mul_(0.5)
    return head


@pytest.mark.parametrize("name", ["eagle3", "eagle3 reduced", "eagle3 llama3 positions"])
def test_its_own_loader_gives_the_same_head(name: str, tmp_path: Path):
    """Guards CF-04: same tensors, same states, same logits there; and what it writes comes back unchanged."""
    speculators = pytest.importorskip("speculators", reason="pip install speculators, in an environment of its own")
    base = tmp_path / "base"
    deep_target().model.save_pretrained(base)
    head = small(name)
    facts = {**FACTS, "target": {"model": str(base), "architectures": ["LlamaForCausalLM"]}}
    save_head(head, tmp_path / "ours", facts, "speculators", dtype=torch.float32)

    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "ours")).eval().float()
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(theirs.state_dict()[key].to(tensor.dtype), tensor) for key, tensor in written.items())
    assert theirs.config.eagle_aux_hidden_state_layer_ids == list(head.feature_layers)

    # a folder without a copy of the target's embedding leaves it to whoever loads it; release 0.9 does so by chance
    theirs.embed_tokens.load_state_dict({"weight": deep_target().model.state_dict()["model.embed_tokens.weight"]})

    generator = torch.Generator().manual_seed(5)
    states = torch.randn(1, TOKENS, 3 * HIDDEN, generator=generator)
    ids, at = torch.randint(0, VOCAB, (1, TOKENS), generator=generator), torch.arange(TOKENS)[None]
    parts = SharedParts(deep_target(), head.vocabulary)
    with torch.inference_mode():
        head.rotation.reserve(TOKENS, states)
        ours = head.logits(head.step(head.fc(states), parts.embed(ids), head.rotation.at(at), attend), parts.output)
        both = torch.cat([theirs.embed_tokens(ids), theirs.fc(states)], dim=-1)
        theirs.layers[0].self_attn.config._attn_implementation = "eager"
        mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)[None, None]
        rotation = theirs.rotary_emb(both, at)
        state = theirs.layers[0](both, attention_mask=mask, position_ids=at, position_embeddings=rotation)
        assert (theirs.lm_head(theirs.norm(state)) - ours).abs().max() < 1e-5

    theirs.save_pretrained(tmp_path / "theirs")
    back, _ = load_head("eagle3", str(tmp_path / "theirs"), deep_target())
    assert all(torch.equal(back.state_dict()[key], tensor) for key, tensor in head.state_dict().items())
