"""Quantised products: integer kernels give the reference's bits on every instruction set, the others its numbers."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from paceline.layers import build
from paceline.layers.build import load_kernels, set_threads
from paceline.layers.file_tables import FileTables, fused_tables
from paceline.layers.linear import Linear, linear_reference
from paceline.layers.packed import PackedMatrix
from paceline.layers.quantized import LinearWeight, QuantizedWeight, fuse
from paceline.layers.quantized_reference import integer_linear_reference, round_rows
from paceline.models.quantization.fusing import fuse_layers
from paceline.models.quantization.round_to_nearest import SCHEMES, round_to_nearest
from paceline.parallel.slabs import slabs_of
from tests.support.needs import LESSER_BUILDS, needs_kernels, other_kernels
from tests.support.quantized_weights import INTEGER, KINDS, OF_FILES

OF_INTEGERS = INTEGER | OF_FILES
SHAPES = [(96, 576), (40, 1536), (33, 100), (5, 24)]
ROWS = 40  # more than tiles of AMX begin at, for codes of 8 bits and of 4
DTYPES = [torch.bfloat16, torch.float32]
# What the sources of integer products export as C++; host.cpp has the threads.
SOURCES, OF_FLOATS = ["integer_linear.cpp", "integer_pack.cpp", "host.cpp"], "dequantised_linear.cpp"
LINEAR_F32 = "_Z14linear_integerIffEvRK6MatrixPKT_llPT0_"
LINEAR_OF_FLOATS = "_Z18linear_dequantisedItfEvRK6MatrixPKT_llPT0_"  # bf16 to float32
WRITTEN_OUT = "AMX, its instructions written out"
FAKE_AMX = Path(__file__).with_name("fake_amx.h")
INSTRUCTIONS = {
    "AVX-512 without VNNI": ("-mno-avx512vnni",),
    WRITTEN_OUT: ("-include", str(FAKE_AMX)),
}
WHOLE = {"AVX2": ("-march=x86-64-v3", "-O0"), "generic": LESSER_BUILDS[0]}  # that other tests compile as well


def random_weight(out_features: int, in_features: int) -> torch.Tensor:
    """One row is constant and one alternates between extremes: sums of 16 bits would saturate there."""
    weight = torch.randn(out_features, in_features) * 0.05
    weight[0], weight[1] = 0.2, torch.tensor([0.2, -0.2]).repeat(in_features // 2)
    return weight


def random_rows(rows: int, in_features: int) -> torch.Tensor:
    """Ordinary rows, outliers, zeros, constants, numbers almost too small, an infinity and a NaN."""
    x = torch.randn(rows, in_features)
    x[1], x[2], x[4] = 0.0, 3.0, 1e-32
    x[3, 5], x[5, 2], x[6, 3] = 1e4, torch.inf, torch.nan
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether numbers are equal, signs of zeros and where NaNs are included."""
    numbers = [torch.where(t.isnan(), 12345.0, t.float()).view(torch.int32) for t in (a, b)]
    return torch.equal(*numbers)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES)
@pytest.mark.parametrize("kind", OF_INTEGERS)
def test_integer_kernels_give_the_bits_of_the_reference(
    kind: str, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    """Mutants: a scale for a whole tensor, groups added in the order of threads, vpmaddubsw in place of vpdpbusd,
    groups of 16 in tiles of 32, a table of float32 minimums read as far behind the scales as one of float16, whole
    numbers of scales without their sign, the steps of a panel's first run for all of them."""
    weight, x = OF_INTEGERS[kind](random_weight(out_features, in_features)), random_rows(ROWS, in_features).to(dtype)
    for bias, out_float32 in ((None, False), (torch.randn(out_features), True)):
        expected = integer_linear_reference(x, weight, bias, torch.float32 if out_float32 else dtype)
        linear = Linear(weight, bias, out_float32)
        for threads in (1, 2):
            set_threads(threads)
            got = [linear(x), torch.cat([linear(part) for part in torch.split(x, 7)])]
            set_threads(1)
            assert [same_bits(y, expected) for y in got] == [True, True]
        assert torch.isnan(expected[5:7]).any(dim=1).all()


@needs_kernels
@pytest.mark.parametrize("name", [*INSTRUCTIONS, *WHOLE])
def test_every_instruction_set_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(compiled(name, tmp_path / "lesser.so", monkeypatch))
    run, address = getattr(library, LINEAR_F32), ctypes.c_void_p
    library.pl_panels_bytes.restype, library.pl_panels_bytes.argtypes = ctypes.c_int64, [address]
    library.pl_pack_panels.argtypes, run.argtypes = [address] * 8, [address] * 2 + [ctypes.c_int64] * 2 + [address]
    for kind, make in OF_INTEGERS.items():
        for width, slabs in ((200, 1), (256, 1), (256, 2), (896, 7)):
            weight, x, out = make(random_weight(40, width)), random_rows(ROWS, width), torch.empty(ROWS, 40)
            slabs = slabs_of(width, slabs, weight.kept_together)
            matrix = PackedMatrix(library, weight, None, slabs)
            run(matrix.address, x.data_ptr(), ROWS, width, out.data_ptr())
            assert same_bits(out, integer_linear_reference(x, weight, None, torch.float32, slabs)), kind
    if "VNNI" not in name:  # products of floats know nothing of it
        _check_products_of_floats(library)


def compiled(name: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a library with these instructions. A host with AMX has its own, which need not be written out."""
    host, compiler = load_kernels(), build.find_compiler()
    assert host is not None
    assert compiler is not None
    if name == WRITTEN_OUT and "amx" in build.kernel_set():
        return host._name
    if name in WHOLE:
        return str(other_kernels(*WHOLE[name]))
    sources = SOURCES if "VNNI" in name else [*SOURCES, OF_FLOATS]
    monkeypatch.setattr(build, "_translation_units", lambda: [build.SOURCES / source for source in sources])
    build._build([compiler, *build.FLAGS, "-O0", *INSTRUCTIONS[name]], target)
    return str(target)


@needs_kernels
def test_products_of_floats_do_not_depend_on_rows_and_threads() -> None:
    """This host's own set. Mutants: minimums are added before sums where a panel's numbers are made first; few rows sum
    the elements of a tile's pairs together."""
    library = load_kernels()
    assert library is not None
    _check_products_of_floats(library)


def _check_products_of_floats(library: ctypes.CDLL) -> None:
    """Near the numbers that codes stand for, and each row the same beside others, on other threads and alone. Scales
    that are made of float8 give the bits of scales in float32, in fewer bytes. Mutants: a number times its inverse in
    place of a division; the number of another output."""
    run, address = getattr(library, LINEAR_OF_FLOATS), ctypes.c_void_p
    run.argtypes = [address] * 2 + [ctypes.c_int64] * 2 + [address]
    for kind, (width, slabs) in product(KINDS.keys() - INTEGER.keys(), ((200, 1), (288, 1), (512, 2))):
        weight, x = KINDS[kind](random_weight(40, width)), torch.randn(37, width).bfloat16()
        matrix, whole = PackedMatrix(library, weight, None, slabs), torch.empty(37, 40)
        run(matrix.address, x.data_ptr(), 37, width, whole.data_ptr())
        torch.testing.assert_close(whole, x.float() @ weight.dequantised().t(), rtol=2e-2, atol=2e-2)
        if weight.tables is not None:
            plain, other = PackedMatrix(library, replace(weight, tables=None), None, slabs), torch.empty(37, 40)
            run(plain.address, x.data_ptr(), 37, width, other.data_ptr())
            assert torch.equal(whole, other), (kind, width)
            assert matrix.packed.nbytes < plain.packed.nbytes
        for rows, threads in product((1, 2, 4, 5, 6, 7, 12, 16, 17, 20), (1, 2)):
            library.pl_set_threads(threads)
            out = torch.empty(rows, 40)
            run(matrix.address, x[20 - rows :].data_ptr(), rows, width, out.data_ptr())
            library.pl_set_threads(1)
            assert torch.equal(out, whole[20 - rows : 20]), (kind, width, rows, threads)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - INTEGER.keys()))
def test_codes_multiplied_as_floats(kind: str, dtype: torch.dtype) -> None:
    for out_features, in_features in SHAPES:
        weight, x = KINDS[kind](random_weight(out_features, in_features)), torch.randn(9, in_features).to(dtype)
        dense, bias = weight.dequantised(), torch.randn(out_features)
        expected = linear_reference(x.float(), dense, bias, torch.float32)
        torch.testing.assert_close(Linear(weight, bias, out_float32=True)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounding_to_nearest_is_near(scheme: str) -> None:
    weight = torch.randn(12, 100) * 0.1
    weight[3] = 0.0
    rounded = round_to_nearest(weight.bfloat16(), scheme)
    steps = rounded.scales.repeat_interleave(rounded.group_size, dim=1)[:, :100]
    assert ((rounded.dequantised() - weight.bfloat16().float()).abs() <= 0.51 * steps + 1e-3 * weight.abs()).all()
    assert not rounded.dequantised()[3].any()
    assert rounded.codes.abs().max() <= (127 if rounded.bits == 8 else 8)


def test_a_group_with_an_outlier_costs_its_neighbours_nothing() -> None:
    x = torch.randn(1, 128)
    codes, scales = round_rows(x, 64)
    x[0, 0] = 1000.0
    with_outlier, other_scales = round_rows(x, 64)
    assert torch.equal(codes[:, 1], with_outlier[:, 1])
    assert torch.equal(scales[:, 1], other_scales[:, 1])


def test_scales_whose_minimums_float16_cannot_hold_have_no_tables_together() -> None:
    """Mutant: minimums of infinity, which are not those of the values."""
    large, least = torch.full((1, 1), 6e4).half(), torch.zeros(1, 1).half()
    assert fused_tables([FileTables(large, None), FileTables(least, least)]) is None
    whole = torch.ones(1, 1, dtype=torch.int8)
    assert fused_tables([FileTables(whole, None, large), FileTables(whole, whole, least, least)]) is None


@needs_kernels
def test_weights_that_no_kernel_can_hold_are_refused() -> None:
    odd = QuantizedWeight(torch.zeros(4, 36, dtype=torch.int8), torch.ones(4, 3), None, 8, 12, True)
    with pytest.raises(ValueError, match="groups of 12 elements"):
        Linear(odd)
    wide = replace(odd, codes=torch.zeros(1, 1 << 18, dtype=torch.int8), scales=torch.ones(1, 1), group_size=1 << 18)
    with pytest.raises(ValueError, match="do not fit 32 bits"):
        Linear(wide)


@needs_kernels
def test_fused_weights_give_the_outputs_side_by_side() -> None:
    x = torch.randn(5, 576)
    for make in (KINDS | OF_FILES).values():
        parts = [make(random_weight(n, 576)) for n in (24, 8)]
        assert torch.equal(Linear(fuse(parts))(x), torch.cat([Linear(part)(x) for part in parts], dim=1))


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K", "Q4_1", "float4 times a number", "float4 over a number"])
def test_tables_of_files_stay_those_of_the_values(kind: str) -> None:
    """However a weight is cut, joined and put in order. Mutants: steps cut as groups are, or not at all."""
    weight, order = (OF_FILES | KINDS)[kind](random_weight(48, 1024)), torch.randperm(48)
    parts: list[LinearWeight] = [weight.rows(3, 17), weight.of_rows(order), weight.columns(256, 1024)]
    parts += [weight.columns(256, 1024).rows(1, 4), weight.columns(0, 512), weight.copied()]
    parts.append(fuse([weight, weight.rows(0, 5)]))
    if kind in ("Q6_K", "Q4_K"):  # beside one that has no minimums, and groups of another size
        parts.append(fuse_layers({"q": weight, "v": OF_FILES["Q6_K"](random_weight(8, 1024))}))
    for part in parts:
        assert isinstance(part, QuantizedWeight)
        assert part.tables is not None
        scales, minimums = part.tables.values()
        assert torch.equal(scales, part.scales)
        assert (minimums is None) == (part.minimums is None)
        if minimums is not None:
            assert part.minimums is not None
            assert torch.equal(minimums, part.minimums)
    parted = weight.columns(32, 1024)  # the first step ends in the middle
    assert (parted.tables is None) == (kind in ("Q6_K", "Q4_K"))
    assert torch.equal(parted.dequantised(), weight.dequantised()[:, 32:])
