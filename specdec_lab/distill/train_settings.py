"""The settings of a training, checked before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec_lab.config import PositiveInt, Threads
from specdec_lab.distill.schedule import Shape

Below1 = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

FREE_ON_RESUME = frozenset(
    {
        "batch_size",
        "accumulation",
        "threads",
        "log_every",
        "evaluate_every",
        "save_every",
        "keep",
        "features",
        "feature_bytes",
        "feature_layers",
        "measure_prompts",
        "measure_tokens",
        "min_coverage",
        "resume",
        "overwrite",
    }
)
"""Settings that may differ where a training goes on: they leave samples, learning rates and losses as they are.

``batch_size`` and ``accumulation`` count through the examples per step, which have to stay the same."""


class TrainSettings(BaseModel):
    """Values of ``conf/train.yaml`` besides its groups; the file explains each. Intervals are in optimizer steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: PositiveInt = 1
    max_steps: Annotated[int, Field(strict=True, ge=0)] | None = None
    batch_size: PositiveInt = 8
    accumulation: PositiveInt = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    schedule: Shape = "cosine"
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 50
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    betas: tuple[Below1, Below1] = (0.9, 0.95)
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 1.0
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    start: Annotated[str, Field(min_length=1)] | None = None
    threads: Threads | None = None
    log_every: PositiveInt = 10
    evaluate_every: PositiveInt | None = 200
    save_every: PositiveInt = 200
    keep: PositiveInt = 2
    features: Literal["online", "offline"] = "online"
    feature_bytes: PositiveInt | None = None
    feature_layers: tuple[int, ...] = ()
    measure_prompts: Annotated[int, Field(strict=True, ge=0)] = 6
    measure_tokens: PositiveInt = 32
    min_coverage: Annotated[float, Field(ge=0, le=1)] = 0.8
    resume: bool = False
    overwrite: bool = False

    def group_size(self, processes: int) -> int:
        """Return the examples of one optimizer step over all micro-batches and processes."""
        return self.batch_size * self.accumulation * processes

    def fixed(self, processes: int) -> dict[str, Any]:
        """Return what must be the same where a training goes on, as plain values."""
        kept = {name: value for name, value in self.model_dump(mode="json").items() if name not in FREE_ON_RESUME}
        return {**kept, "examples_per_step": self.group_size(processes)}
