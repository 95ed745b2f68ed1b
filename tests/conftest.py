"""Shared set-up: one thread, no network, and targets that are built once."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import settings
from tiny_models import ARCHITECTURES, tiny_model

from specdec_lab.target import Exact, Target

pytest.register_assert_rewrite("oracles")  # failures there show their values too

# The same examples each time, and no limit that a busy machine could break.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # tiny models lose time to a second thread


@cache
@torch.inference_mode(False)  # whoever asks first: others may want gradients
def _target(architecture: str, exact: Exact) -> Target:
    return Target(tiny_model(architecture), name=architecture, exact=exact)


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Return ``(architecture, exact) -> Target`` with random weights; the same one each time, with an empty cache."""

    def get(architecture: str = "llama", exact: Exact = "off") -> Target:
        target = _target(architecture, exact)
        target.allocate(1, 1, 1)
        return target

    return get


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["off", "fixed_shape"])
def exact(request: pytest.FixtureRequest) -> Exact:
    return request.param
