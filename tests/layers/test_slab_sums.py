"""Slabs of a linear: a tree over float32 sums, whose bits do not depend on how many ranks hold its branches."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from paceline.layers import build
from paceline.layers.linear import Linear, linear_reference
from paceline.layers.quantized import QuantizedWeight
from paceline.layers.quantized_reference import integer_linear_reference
from paceline.models.row_parallel import row_parallel
from paceline.parallel.slabs import tree_sum
from tests.support.needs import needs_kernels
from tests.support.quantized_weights import KINDS

DTYPES = [torch.bfloat16, torch.float32]
SLABS = (1, 2, 3, 4, 5, 7, 8)
ROWS = 40
WIDTH = 96  # of a slab: three tiles
WRITTEN_OUT = "AMX, its instructions written out"
INSTRUCTIONS = {
    "AVX2": ("-march=x86-64-v3",),
    "generic": ("-DPACELINE_GENERIC",),
    WRITTEN_OUT: ("-include", str(Path(__file__).with_name("fake_amx.h"))),
}


def numbers(slabs: int, out_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, a weight and a bias large enough that the order of every addition shows."""
    width = slabs * WIDTH
    weight, x = torch.randn(out_features, width).to(dtype), torch.randn(ROWS, width).to(dtype)
    return x, weight, torch.randn(out_features) * 10


def by_ranks(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slabs: int, degree: int) -> torch.Tensor:
    """The product as ``degree`` ranks make it, each of its own columns."""
    parts = zip(weight.chunk(degree, dim=1), x.chunk(degree, dim=1), strict=True)
    own = slabs // degree
    roots = [Linear(columns, out_float32=True, slabs=own)(rows) for columns, rows in parts]
    return (tree_sum(roots) + bias).to(x.dtype)


def check(dtype: torch.dtype, out_features: int, row_counts: range) -> None:
    for slabs in SLABS:
        x, weight, bias = numbers(slabs, out_features, dtype)
        linear = Linear(weight, bias, slabs=slabs)
        whole = linear(x)
        torch.testing.assert_close(
            Linear(weight, bias, out_float32=True, slabs=slabs)(x),
            (x.double() @ weight.double().t() + bias).float(),
            rtol=1e-4,
            atol=1e-4,
        )
        for degree in (t for t in range(1, slabs + 1) if slabs % t == 0):
            assert torch.equal(by_ranks(x, weight, bias, slabs, degree), whole), (slabs, degree)
        assert all(torch.equal(linear(x[:rows]), whole[:rows]) for rows in row_counts), slabs
        cut = out_features // 64 * 32  # where the second of two ranks has its first column
        parts = [Linear(weight[part], bias[part], slabs=slabs)(x) for part in (slice(cut), slice(cut, None))]
        assert torch.equal(torch.cat(parts, dim=1), whole), slabs


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [96, 77, 81])
def test_every_degree_has_the_bits_of_one(dtype: torch.dtype, out_features: int) -> None:
    """Mutants: a sum from left to right, sums of slabs rounded to bf16, the bias in every slab."""
    check(dtype, out_features, range(1, ROWS + 1))


@needs_kernels
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_on_every_instruction_set(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != WRITTEN_OUT or "amx" not in build.kernel_set():  # else the host has them itself
        library = compiled(INSTRUCTIONS[name], tmp_path / "lesser.so")
        monkeypatch.setattr("paceline.layers.linear.load_kernels", lambda: library)
    for dtype in DTYPES:
        check(dtype, 77, range(1, ROWS + 1, 13))


def compiled(flags: tuple[str, ...], target: Path) -> ctypes.CDLL:
    """Dense linears for a lesser instruction set; what else they name is the host's."""
    host, compiler = build.load_kernels(), build.find_compiler()
    assert host is not None
    assert compiler is not None
    source = str(build.SOURCES / "linear.cpp")
    build._run([compiler, *build.FLAGS, "-O0", *flags, "-shared", source, host._name, "-o", str(target)])
    library = ctypes.CDLL(str(target))
    for name in ("pl_packed_elems", "pl_pack_bf16", "pl_pack_f32", "pl_linear_bf16", "pl_linear_f32"):
        function, known = getattr(library, name), getattr(host, name)
        function.argtypes, function.restype = known.argtypes, known.restype
    return library


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_torch(dtype: torch.dtype) -> None:
    """Mutant: sums of slabs rounded to bf16."""
    for slabs in SLABS[1:]:
        x, weight, bias = numbers(slabs, 33, dtype)
        exact = x.double() @ weight.double().t() + bias
        got = linear_reference(x, weight, bias, torch.float32, slabs)
        torch.testing.assert_close(got, exact.float(), rtol=1e-4, atol=1e-4)
        assert linear_reference(x, weight, bias, dtype, slabs).dtype is dtype


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_codes(kind: str) -> None:
    """Quantised weights have the slabs of dense ones, where these are of whole groups. Mutants: scales cut at the wrong
    place, scales of whole rows after the tree, one group too few in a slab."""
    for slabs, dtype in ((8, torch.bfloat16), (7, torch.float32)):
        x, weight = torch.randn(ROWS, slabs * 128).to(dtype), KINDS[kind](torch.randn(77, slabs * 128) * 0.05)
        whole = Linear(weight, out_float32=True, slabs=slabs)(x)
        torch.testing.assert_close(whole, Linear(weight, out_float32=True)(x), rtol=1e-3, atol=1e-3)
        for degree in (t for t in range(1, slabs + 1) if slabs % t == 0):
            runs = [
                range(start, start + 128 * slabs // degree) for start in range(0, slabs * 128, 128 * slabs // degree)
            ]
            roots = [
                Linear(weight.columns(run.start, run.stop), out_float32=True, slabs=slabs // degree)(
                    x[:, run.start : run.stop]
                )
                for run in runs
            ]
            assert torch.equal(tree_sum(roots), whole), degree
        if weight.int8_activations:
            assert torch.equal(integer_linear_reference(x, weight, None, torch.float32, slabs), whole)
    with pytest.raises(ValueError, match="of whole groups of"):
        Linear(KINDS["w8a8 groups of 128"](torch.randn(40, 384)), slabs=6)


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_minimums_of_whole_rows(bits: int) -> None:
    """A row of one group with a minimum has one slab, however many the model has. Mutant: ``kept_together`` is 1 for
    every group as long as its row, and the product is its bias alone."""
    codes = torch.randint(-8, 8, (77, 256), dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.rand(77, 1), torch.randn(77, 1), bits, 256, False)
    x, bias = torch.randn(ROWS, 256), torch.randn(77)
    linear = row_parallel(weight, 4, bias)
    assert linear.slabs == 1
    torch.testing.assert_close(linear(x), x @ weight.dequantised().t() + bias, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="of whole groups of 256"):
        Linear(weight, bias, slabs=4)


@pytest.mark.parametrize(("slabs", "width"), [(0, 256), (9, 288), (2, 96), (8, 100)])
def test_slabs_that_cannot_be_had_are_refused(slabs: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{slabs} slabs of {width}"):
        Linear(torch.ones(4, width), slabs=slabs)
