"""Time of a forward from a machine's data sheet and a model's shape: a floor, not a forecast."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(strict=True, ge=1)]


class Hardware(BaseModel):
    """One accelerator; ``conf/predict/machines/`` names the source of each number.

    Attributes:
        memory_bytes_per_second: of its main memory.
        flops_per_second: dense, in the precision of the weights, a multiplication and an addition counted as two.
        memory_bytes: that a model and its caches can fill.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_bytes_per_second: Positive
    flops_per_second: Positive
    memory_bytes: Positive


class ModelShape(BaseModel):
    """What a decoder reads and computes per token; ``conf/predict/models/`` names the source of each.

    Attributes:
        parameters: all of them.
        lookup_parameters: those of an input embedding that is not tied to the output layer: a step reads a row of it.
        layers: that keep keys and values.
        kv_heads: per layer.
        head_dim: entries of a key, and of a value.
        bytes_per_parameter: 2 for bfloat16.
        kv_bytes_per_entry: of the cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: Whole
    lookup_parameters: Annotated[int, Field(strict=True, ge=0)] = 0
    layers: Whole
    kv_heads: Whole
    head_dim: Whole
    bytes_per_parameter: Positive = 2
    kv_bytes_per_entry: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2

    @property
    def read_parameters(self) -> int:
        """Return the parameters that a forward reads and multiplies with."""
        return self.parameters - self.lookup_parameters

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of all parameters."""
        return self.parameters * self.bytes_per_parameter

    def kv_bytes(self, tokens: int, batch_size: int = 1) -> float:
        """Return the bytes of a cache of ``batch_size`` rows: linear in the tokens of a row, not quadratic.

        2 (keys and values) x layers x heads of keys and values x entries of a head x tokens x bytes x rows.
        """
        entries = 2 * self.layers * self.kv_heads * self.head_dim * tokens * batch_size
        return entries * self.kv_bytes_per_entry


def forward_seconds(shape: ModelShape, hardware: Hardware, nodes: float, batch_size: int = 1, tokens: int = 0) -> float:
    """Return the least time of a forward of ``nodes`` tokens in each of ``batch_size`` rows.

    The larger of reading all weights and of two operations per parameter and token, and then the reading of the
    cache, once per row however many nodes the row verifies. The operations of attention are left out: at 8 k tokens
    they are a few per cent of those of the weights.

    Args:
        tokens: that each row has in the cache.
    """
    reading = shape.read_parameters * shape.bytes_per_parameter / hardware.memory_bytes_per_second
    computing = 2 * shape.read_parameters * nodes * batch_size / hardware.flops_per_second
    return max(reading, computing) + shape.kv_bytes(tokens, batch_size) / hardware.memory_bytes_per_second


def crossover_nodes(shape: ModelShape, hardware: Hardware) -> float:
    """Return the tokens of a forward, over all rows, from which on computing takes longer than reading."""
    return hardware.flops_per_second * shape.bytes_per_parameter / (2 * hardware.memory_bytes_per_second)


def devices_needed(hardware: Hardware, *bytes_held: float) -> int:
    """Return how many accelerators hold so much together."""
    return int(-(-sum(bytes_held) // hardware.memory_bytes))
