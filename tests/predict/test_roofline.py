"""Times from data sheets against hand-worked values."""

from __future__ import annotations

import pytest

from specdec_lab.predict.roofline import Hardware, ModelShape, crossover_nodes, devices_needed, forward_seconds
from specdec_lab.predict.settings import sheet, sheets

SEVEN_B = ModelShape(parameters=6_738_415_616, lookup_parameters=131_072_000, layers=32, kv_heads=32, head_dim=128)
TWO_TB = Hardware(memory_bytes_per_second=2e12, flops_per_second=312e12, memory_bytes=80e9)


def test_floor_of_a_7b_step():
    """All weights are read, 13.2 GB at 2 TB/s are 6.6 ms; one d x d matrix a layer would say 0.54."""
    assert 1e3 * forward_seconds(SEVEN_B, TWO_TB, 1) == pytest.approx(6.61, abs=0.01)


def test_cache_is_linear_in_tokens():
    """2 x 32 layers x 32 heads x 128 x 2 bytes are half a MiB a token, and ten times the tokens ten times that."""
    assert SEVEN_B.kv_bytes(1) == 512 * 1024
    assert SEVEN_B.kv_bytes(10_000) == 10 * SEVEN_B.kv_bytes(1_000)
    assert SEVEN_B.kv_bytes(100, 8) == 8 * SEVEN_B.kv_bytes(100)


def test_computing_takes_over_where_the_two_are_equal():
    """At the crossover reading takes as long as computing; twice as many nodes take twice as long."""
    nodes = crossover_nodes(SEVEN_B, TWO_TB)
    assert nodes == pytest.approx(156)
    at = forward_seconds(SEVEN_B, TWO_TB, nodes)
    assert forward_seconds(SEVEN_B, TWO_TB, nodes / 2) == pytest.approx(at)
    assert forward_seconds(SEVEN_B, TWO_TB, nodes, batch_size=2) == pytest.approx(2 * at)


def test_the_cache_is_read_once_for_all_nodes():
    """What makes speculation pay at long contexts: nodes of a row share its cache."""
    few, many = (forward_seconds(SEVEN_B, TWO_TB, nodes, tokens=8192) for nodes in (1, 8))
    assert few == many
    assert few - forward_seconds(SEVEN_B, TWO_TB, 1) == pytest.approx(SEVEN_B.kv_bytes(8192) / 2e12)


def test_devices():
    """141 GB of weights do not fit into 80."""
    assert devices_needed(TWO_TB, 141e9) == 2
    assert devices_needed(TWO_TB, 80e9) == 1
    assert devices_needed(TWO_TB, 80e9, 1) == 2


@pytest.mark.parametrize("name", sheets("machines"))
def test_hardware_files(name: str):
    """Each is complete, its exponents are numbers, and reading is what bounds a forward of one token."""
    assert 50 < crossover_nodes(SEVEN_B, sheet("hardware", "machines", name, Hardware)) < 400


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "inner", "kv", "dim", "heads", "vocabulary", "tied", "head_norms"),
    [
        ("llama3_70b", 80, 8192, 28672, 8, 128, 64, 128256, False, False),
        ("llama3_8b", 32, 4096, 14336, 8, 128, 32, 128256, False, False),
        ("llama3_1b", 16, 2048, 8192, 8, 64, 32, 128256, True, False),
        ("qwen3_8b", 36, 4096, 12288, 8, 128, 32, 151936, False, True),
        ("vicuna_7b", 32, 4096, 11008, 32, 128, 32, 32000, False, False),
        ("smollm2_135m", 30, 576, 1536, 3, 64, 9, 49152, True, False),
    ],
)
def test_shape_files_count_as_their_layers_do(
    name: str, layers: int, hidden: int, inner: int, kv: int, dim: int, heads: int, vocabulary: int, tied: bool,
    head_norms: bool,
):  # fmt: skip
    """Parameters recounted from each model's configuration."""
    shape = sheet("target", "models", name, ModelShape)
    layer = 2 * hidden * heads * dim + 2 * hidden * kv * dim + 3 * hidden * inner + 2 * hidden
    layer += 2 * dim if head_norms else 0
    table = vocabulary * hidden
    assert shape.parameters == layers * layer + hidden + table * (1 if tied else 2)
    assert shape.lookup_parameters == (0 if tied else table)
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (layers, kv, dim)


def test_every_shape_file_is_recounted():
    """A new file needs a line above."""
    assert len(sheets("models")) == 6
