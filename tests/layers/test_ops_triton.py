"""The fused kernels of a decoder layer against their torch references, in Triton's interpreter."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.assembly.selfcheck import ProbedBits
from paceline.attention.base import Segment
from paceline.layers import ops
from paceline.layers.build import load_kernels
from paceline.triton_support import has_triton
from tests.support.interpreter import INTERPRETED, Again
from tests.support.recording import plain_torch
from tests.support.tiny_deepseek import tiny_deepseek_runner
from tests.support.tiny_model import tiny_runner

if has_triton():
    from paceline.layers import ops_triton
    from tests.support import layer_ops

torch.set_num_threads(1)
CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")
shapes = settings(max_examples=12, deadline=None, derandomize=True)
WIDTHS = st.one_of(st.integers(1, 130), st.sampled_from([128, 576, 1000, 4096]))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@interpreted
@given(
    rows=st.integers(0, 6),
    heads=st.integers(1, 3),
    width=WIDTHS,
    dtype=st.sampled_from(DTYPES),
    gap=st.sampled_from([0, 0, 5, 8]),
)
@shapes
def test_norm(rows: int, heads: int, width: int, dtype: torch.dtype, gap: int) -> None:
    layer_ops.check_norm(CPU, rows, heads, width, dtype, gap)
    layer_ops.check_add_norm(CPU, rows, width, dtype)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_whose_sum_is_exact_is_bit_for_bit_torchs(dtype: torch.dtype) -> None:
    """No order of adding up the squares of small whole numbers rounds: rounding is everywhere where torch rounds."""
    for width in (64, 100, 576, 4096):
        x, residual = (torch.randint(-7, 8, (5, width)).to(dtype) for _ in range(2))
        weight = torch.randn(width).to(dtype)
        assert torch.equal(ops_triton.rms_norm(x, weight, 1e-5), ops.rms_norm_reference(x, weight, 1e-5))
        kept = residual.clone()
        found = ops_triton.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(found, ops.add_rms_norm_reference(x, kept, weight, 1e-5))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_stay_so_and_alone(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 40).to(dtype), torch.randn(40).to(dtype)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    with np.errstate(invalid="ignore"):  # in the interpreter
        found = ops_triton.rms_norm(x, weight, 1e-5)
    expected = ops.rms_norm_reference(x, weight, 1e-5)
    assert torch.equal(found.isnan(), expected.isnan())
    layer_ops.assert_close(found, expected, 2)
    assert bool(found[[0, 3]].isfinite().all())


@interpreted
def test_a_norm_of_another_dtypes_weight() -> None:
    x, weight = torch.randn(3, 48).to(torch.bfloat16), torch.randn(48)
    layer_ops.assert_close(ops_triton.rms_norm(x, weight, 1e-5), ops.rms_norm_reference(x, weight, 1e-5), 2)


@interpreted
@given(rows=st.integers(0, 6), width=WIDTHS, dtype=st.sampled_from(DTYPES))
@shapes
def test_silu(rows: int, width: int, dtype: torch.dtype) -> None:
    layer_ops.check_silu(CPU, rows, width, dtype)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_slabs(dtype: torch.dtype) -> None:
    """Mutant: a sum from left to right."""
    for rows, width in ((0, 32), (3, 37), (2, 1056)):
        layer_ops.check_slabs(CPU, rows, width, dtype)


@interpreted
@given(
    rows=st.integers(0, 6),
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 70),
    page_size=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(DTYPES),
)
@shapes
def test_rope(rows: int, heads: int, kv_heads: int, half: int, page_size: int, dtype: torch.dtype) -> None:
    layer_ops.check_rope(CPU, rows, heads * kv_heads, kv_heads, 2 * half, page_size, dtype)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope_dim", "gap"), [(3, 28, 6, 5), (20, 512, 64, 0), (17, 96, 16, 8)])
def test_latent(heads: int, rank: int, rope_dim: int, gap: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 7):
        layer_ops.check_latent(CPU, rows, heads, rank, rope_dim, dtype, gap)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    for width in (32, 37):
        layer_ops.check_invariance(CPU, 7, width, dtype)
    layer_ops.check_latent_invariance(CPU, 28, 6, dtype)


@interpreted
def test_padding_and_slots_outside() -> None:
    layer_ops.check_padding(CPU)
    layer_ops.check_slots_outside(CPU)


LLAMA = {"add_rms_norm": 5, "rope_write": 2, "silu_mul": 2}  # of two layers, and the final norm


@interpreted
@pytest.mark.parametrize("deepseek", [False, True])
def test_a_models_step_runs_on_them(deepseek: bool) -> None:
    """The same hidden rows and the same pages as by torch's operations."""

    kernels, torch_alone = ops_triton, mock.patch.object(ops, "runs_triton", return_value=False)
    options: dict[str, object] = {"attention": "torch", "kv_cache_tokens": 256, "max_model_len": 64}
    unasked = mock.patch("paceline.assembly.build.probe_bits", return_value=ProbedBits(True, ""))  # many slow forwards
    with plain_torch(), torch_alone, unasked:
        runner = (tiny_deepseek_runner if deepseek else tiny_runner)("fp32", drafter="none", **options)

    def step() -> tuple[torch.Tensor, list[torch.Tensor]]:
        slots = torch.arange(40, dtype=torch.int32)
        for data in runner.kv.data:
            data.zero_()
        with plain_torch():
            rows, _ = runner.forward([Segment.linear([5, 9, 11], 0, slots[:20]), Segment.linear([7], 0, slots[20:])])
        return rows, [data.clone() for data in runner.kv.data]

    names = ("rms_norm", "add_rms_norm", "silu_mul", "rope_write", "latent_write")
    with ExitStack() as patches:
        calls = {n: patches.enter_context(mock.patch.object(kernels, n, wraps=getattr(kernels, n))) for n in names}
        found, found_pages = step()
    counts = {name: call.call_count for name, call in calls.items() if call.called}
    with torch_alone:
        expected, expected_pages = step()
    if deepseek:
        assert set(counts) == {*names} - {"rope_write"}
    else:
        assert counts == LLAMA
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(found_pages, expected_pages, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_cpu_keeps_to_its_own_kernels() -> None:
    """Triton stands behind them where both could run, and is not asked where it cannot run."""
    x, weight = torch.randn(3, 40), torch.ones(40)
    with mock.patch.object(ops, "runs_triton", return_value=False) as asked:
        ops.rms_norm(x.to(torch.float16), weight.to(torch.float16), 1e-5)
    assert asked.called
    if load_kernels() is not None:
        with mock.patch.object(ops, "runs_triton", side_effect=AssertionError):
            ops.rms_norm(x, weight, 1e-5)
