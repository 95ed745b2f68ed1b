"""Every strategy of ``conf/drafter/`` as it is configured there; something untrained stands in for what is shipped."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from heads_at_hand import eagle3_head, eagle_head, medusa_heads
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from specdec_lab.audit.toy import IMPOSSIBLE_LOGIT
from specdec_lab.drafters.base import Drafter
from specdec_lab.drafters.eagle import EagleDrafter
from specdec_lab.drafters.hybrid import HybridDrafter
from specdec_lab.heads.shipped import SHIPPED
from specdec_lab.target import Target

HEADS = {"medusa": medusa_heads, "eagle": eagle_head, "eagle3": eagle3_head}

Make = Callable[[Target], Drafter]


def maker(name: str, folder: Path, **changes: object) -> Make:
    """Return ``target -> drafter``; a draft model is a disturbed copy of the target, a head untrained."""
    text = (resources.files("specdec_lab.conf") / "drafter" / f"{name}.yaml").read_text(encoding="utf-8")

    def make(target: Target) -> Drafter:
        config = OmegaConf.create(text)
        assert isinstance(config, DictConfig)
        given: dict[str, object] = {}
        if "min_probability" in config:  # random models are sure of nothing, and would draft a single level
            config.min_probability = 0
        if config.get("model") == SHIPPED:
            config.model = str(disturbed_copy(target, folder, 1.0 if target.name == "toy" else 0.1))
        if config.get("head") == SHIPPED:
            given["head"] = HEADS[config.get("kind", "medusa")](target)
        kinds = [kind for kind in ("eagle", "eagle3") if kind in config.get("members", ())]
        for kind in kinds:
            config.members.remove(kind)
        drafter = instantiate(OmegaConf.merge(config, changes), target=target, **given)
        assert isinstance(drafter, Drafter)
        for kind in kinds:
            assert isinstance(drafter, HybridDrafter)
            drafter.members.append(EagleDrafter(target, head=HEADS[kind](target), min_probability=0))
            drafter.feature_layers = drafter.members[-1].feature_layers
        if not drafter.lossless:
            pytest.skip(f"{name} says that it is not lossless")
        return drafter

    return make


def disturbed_copy(target: Target, folder: Path, amount: float = 0.1) -> Path:
    """Save the target's model with noise on its weights: a draft that is often right and often wrong."""
    weights = {name: weight.detach().clone() for name, weight in target.model.state_dict().items()}
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(weights[name].float().numpy().tobytes())
    place = folder / f"{digest.hexdigest()}-{amount}"
    if place.exists():
        return place
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in target.model.parameters():
            if weight.dim() > 1:
                spread = float(weight[weight > IMPOSSIBLE_LOGIT].std())  # a toy's impossible tokens stay impossible
                noise = torch.randn(weight.shape, generator=generator) * spread * amount
                weight.add_(noise)
    try:
        target.model.save_pretrained(place)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(place)
    finally:
        target.model.load_state_dict(weights)
    return place
