"""The GPU benchmark's floors: bytes and operations of steps, against the arithmetic written out."""

from __future__ import annotations

import pytest

from benchmarks.gpu.floors import (
    Ceilings,
    Work,
    causal_pairs,
    decode_work,
    eagle3_step_params,
    eagle3_step_work,
    expected_speedup,
    kv_token_bytes,
    page_copy_work,
    prefill_work,
    share,
    weight_bytes,
)
from benchmarks.gpu.shapes import SHAPES, eagle3_config

EIGHT = SHAPES["llama-8b"]
H200 = Ceilings(4.3e12, 780e12)


def test_bytes_of_the_8b_shape() -> None:
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert weight_bytes(EIGHT, 2) == 2 * (32 * layer + 128256 * 4096) == 15_009_316_864
    assert kv_token_bytes(EIGHT, 2) == 131072
    step = decode_work(EIGHT, 2, 1, 2048)
    assert step.num_bytes == 15_009_316_864 + 2050 * 131072  # context, the row itself read and written
    assert step.floor_s(H200) == pytest.approx(step.num_bytes / 4.3e12)
    many = decode_work(EIGHT, 2, 64, 4096)
    assert many.num_bytes == 15_009_316_864 + 64 * 4098 * 131072
    eight_rows = decode_work(EIGHT, 2, 1, 2048, rows=8)
    assert eight_rows.num_bytes - step.num_bytes == 14 * 131072  # a context is read once for all rows
    assert eight_rows.flops == pytest.approx(8 * step.flops, rel=1e-3)


def test_flops_of_the_8b_shape() -> None:
    work = prefill_work(EIGHT, 2, 4096)
    dense = 2 * 4096 * (15_009_316_864 / 2 - 128256 * 4096) + 2 * 128256 * 4096
    attention = 4 * 32 * 32 * 128 * (4096 * 4097 / 2)
    assert work.flops == pytest.approx(dense + attention)
    assert work.floor_s(H200) == pytest.approx(work.flops / 780e12)  # bound by the matrix rate
    assert decode_work(EIGHT, 2, 1, 0).flops == pytest.approx(15_009_316_864, rel=1e-4)  # two a weight


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 7), (5, 9), (3, 3)])
def test_causal_pairs(start: int, end: int) -> None:
    assert causal_pairs(start, end) == sum(range(start + 1, end + 1))


def test_a_draft_step_of_the_8b_shape() -> None:
    config = eagle3_config(EIGHT, 32000)
    shapes = config.tensor_shapes()
    read = [shape for name, shape in shapes.items() if len(shape) == 2 and name != "fc.weight"]
    assert eagle3_step_params(config) == sum(a * b for a, b in read)
    work = eagle3_step_work(config, 2, 1, 2048)
    assert work.num_bytes == 2 * eagle3_step_params(config) + 2050 * 2 * 8 * 128 * 2
    assert work.floor_s(H200) / decode_work(EIGHT, 2, 1, 2048).floor_s(H200) < 0.06  # the reach can be reached


def test_the_rest_of_the_arithmetic() -> None:
    assert page_copy_work(10, 100).num_bytes == 4000
    assert Work(4.0, 10.0).floor_s(Ceilings(2.0, 1.0)) == 10.0
    assert share(1.0, 2.0) == 0.5
    assert expected_speedup(1.0, 0.2, 1.0, 3.0) == pytest.approx(2.5)
