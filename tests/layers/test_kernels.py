"""Kernels against their torch references, and row invariance: a row's bits never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from paceline.layers.build import kernel_set, load_kernels, set_threads
from paceline.layers.linear import Linear, linear_reference
from paceline.layers.ops import (
    add_rms_norm,
    rms_norm,
    rms_norm_reference,
    rope_write,
    rope_write_reference,
    silu_mul,
    silu_mul_reference,
)
from paceline.layers.rotary import rope_table
from tests.support.needs import LESSER_BUILDS, needs_kernels
from tests.support.quantized_weights import KINDS
from tests.support.tolerance import Tolerance

DTYPES = [torch.bfloat16, torch.float32]
SHAPES = [(960, 576), (576, 1536), (40, 24), (33, 100), (17, 33)]
ROWS = [1, 2, 3, 5, 6, 7, 8, 13, 16, 17, 31, 32, 33, 47, 48, 64, 65, 100, 128]

pytestmark = needs_kernels


def tolerance(dtype: torch.dtype) -> Tolerance:
    return {"rtol": 1.6e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
def test_linear_equals_reference(dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight = (torch.randn(out_features, in_features) * 0.05).to(dtype)
    x, bias = torch.randn(37, in_features).to(dtype), torch.randn(out_features).to(dtype)
    for b in (None, bias):
        expected = linear_reference(x.float(), weight.float(), None if b is None else b.float(), torch.float32)
        torch.testing.assert_close(Linear(weight, b)(x).float(), expected, **tolerance(dtype))
        exact = Linear(weight, b, out_float32=True)(x)
        assert exact.dtype is torch.float32
        torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)


def invariant(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    whole = function(x)
    by_rows = all(torch.equal(function(x[:m].contiguous()), whole[:m]) for m in ROWS)
    shifted = torch.equal(function(x[3:50].contiguous()), whole[3:50])
    return by_rows and shifted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_linear_is_row_invariant(kind: str, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight = (torch.randn(out_features, in_features) * 0.05).to(dtype)
    linear = Linear(weight if kind == "dense" else KINDS[kind](weight))
    assert invariant(linear, torch.randn(128, in_features).to(dtype))


def test_the_invariance_check_catches_torch() -> None:
    """The mutant: the same check on torch's own linear, over the geometries of the real model, must fail."""
    caught = []
    for dtype in DTYPES:
        for out_features, in_features in [(960, 576), (576, 1536), (3072, 576)]:
            weight = (torch.randn(out_features, in_features) * 0.05).to(dtype)
            x = torch.randn(128, in_features).to(dtype)
            caught.append(not invariant(partial(F.linear, weight=weight), x))
    assert any(caught)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_does_not_depend_on_threads(dtype: torch.dtype) -> None:
    linear = Linear((torch.randn(960, 576) * 0.05).to(dtype))
    x = torch.randn(50, 576).to(dtype)
    one = linear(x)
    set_threads(2)
    try:
        assert torch.equal(linear(x), one)
    finally:
        set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 20])
def test_row_wise_operations(dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(128, width).to(dtype), torch.randn(width).to(dtype)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **tolerance(dtype))
    assert invariant(lambda r: rms_norm(r, weight, 1e-5), x)
    residual, expected = x.clone(), x + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-5))
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), **tolerance(dtype))
    assert invariant(silu_mul, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_write(dtype: torch.dtype) -> None:
    rows, heads, kv_heads, dim, page_size = 19, 6, 2, 32, 8
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    parts = torch.split_with_sizes(fused, (heads * dim, kv_heads * dim, kv_heads * dim), dim=-1)
    q, k, v = (p.view(rows, -1, dim) for p in parts)
    table, positions = rope_table(dim, 10000.0, 64), torch.randint(0, 64, (rows,))
    slots = torch.randperm(5 * page_size)[:rows]
    pages, expected_pages = (torch.zeros(5, 2, page_size, kv_heads, dim, dtype=dtype) for _ in range(2))
    expected = rope_write_reference(q, k, v, table, positions, slots, expected_pages)
    torch.testing.assert_close(rope_write(q, k, v, table, positions, slots, pages), expected, **tolerance(dtype))
    torch.testing.assert_close(pages, expected_pages, **tolerance(dtype))
    assert torch.equal(pages[:, 1], expected_pages[:, 1])


def test_kernel_set_names_source_and_instructions() -> None:
    isa, _, source = kernel_set().partition("/")
    assert isa
    assert len(source) == 8


def test_lesser_instruction_sets_are_row_invariant_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable path, and where the host's own is AMX the one without it."""
    for flags in LESSER_BUILDS:
        library = load_kernels(flags)
        assert library is not None
        monkeypatch.setattr("paceline.layers.linear.load_kernels", lambda library=library: library)
        weight = (torch.randn(96, 128) * 0.05).to(torch.bfloat16)
        x = torch.randn(128, 128).to(torch.bfloat16)
        linear = Linear(weight)
        assert invariant(linear, x)
        expected = linear_reference(x.float(), weight.float(), None, torch.float32)
        torch.testing.assert_close(linear(x).float(), expected, **tolerance(torch.bfloat16))
