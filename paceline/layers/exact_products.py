"""Products on a GPU whose bits do not depend on the batch: one matrix, one a head, or one an expert.

Weights are read as they lie. Codes are not made into wider ones in memory: a program turns a tile of them into numbers
of x's dtype, or multiplies integers where the weight says so. Codes of four bits lie two in a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton

from paceline.errors import ConfigError
from paceline.layers import integer_triton, products_triton
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.layers.quantized_reference import LEAST_PEAK
from paceline.triton_support import EXACT, next_power_of_2, on_device_of

LEAF = 1024  # elements of k that one chain of instructions adds up; part of the bits
BLOCK_K = {2: 64, 4: 32}  # by bytes of an element of x: elements of k that a program loads at once; divides LEAF
WANTED_PROGRAMS = 132  # of one launch: one for each of a large GPU's multiprocessors
PARTIAL_BYTES = 256 << 20  # of float32 sums of slabs that wait for the tree; more rows go by turns
MERGE_BLOCK = 1024
FEW_COLUMNS = 16  # of a program that multiplies integers for few rows: it has all of k to itself
TILES_BLOCK = 32
SPARE_BYTES = 2048  # of a program's memory, for what Triton keeps there besides blocks


@dataclass(frozen=True)
class Tile:
    """What a program computes at once. None of it changes a bit."""

    rows: int
    columns: int
    warps: int
    stages: int


FEW, SOME, MANY = Tile(16, 64, 4, 5), Tile(32, 64, 4, 4), Tile(64, 64, 2, 4)  # of codes, and of float32
LOW, HIGH = Tile(64, 128, 4, 4), Tile(128, 128, 8, 4)  # of floats of 16 bits
FROM_HIGH = 97  # rows, that take the second


def tile_of(rows: int, dtype: torch.dtype, *, codes: bool) -> Tile:
    """The tile for so many rows of one matrix. dtype: of x; float32 has no matrix instructions here, and a large tile
    would be a long program. codes: whether the weight is made of them."""
    if dtype is not torch.float32 and not codes:
        return LOW if rows < FROM_HIGH else HIGH
    wide = dtype is torch.float32
    return FEW if rows <= FEW.rows else SOME if wide or rows <= SOME.rows else MANY


def stages_of(tile: Tile, itemsize: int, memory: int) -> int:
    """How many blocks of k a program of floats may have on their way. itemsize: bytes of an element. memory: bytes that
    a program may have."""
    each = (tile.rows + tile.columns) * BLOCK_K[itemsize] * itemsize
    return max(min(tile.stages, (memory - SPARE_BYTES) // each), 1)


@lru_cache
def program_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on the device."""
    if device.type != "cuda":
        return 1 << 30  # the interpreter has as much as the host
    index = torch.cuda.current_device() if device.index is None else device.index
    most: int = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return most


@dataclass(frozen=True)
class Grouping:
    """Rows that belong to one matrix each, sorted by it."""

    ends: torch.Tensor  # int32 [matrices], past each matrix's last row
    tiles: torch.Tensor  # int32 [?, 2], see products_triton._tiles_kernel
    tile: Tile
    rows: int

    @classmethod
    def of(cls, ends: torch.Tensor, rows: int, dtype: torch.dtype, *, codes: bool) -> Grouping:
        """ends: see the field; rows: of all matrices together; dtype, codes: see ``tile_of``. The host is not told how
        many rows each matrix has."""
        matrices = ends.shape[0]
        tile = tile_of(-(-rows // matrices), dtype, codes=codes)
        count = max(min(rows, rows // tile.rows + matrices), 1)
        blocks = triton.cdiv(count, TILES_BLOCK)
        tiles = torch.empty(blocks * TILES_BLOCK, 2, dtype=torch.int32, device=ends.device)
        with on_device_of(ends):
            products_triton._tiles_kernel[(blocks,)](
                ends, tiles, MATRICES=matrices, BLOCK_M=tile.rows, COUNT=next_power_of_2(matrices), BLOCK=TILES_BLOCK
            )
        return cls(ends, tiles[:count], tile, rows)


@dataclass(frozen=True)
class Matrices:
    """Weights of equal shapes, [matrices, out_features, in_features], with what they are multiplied as.

    values: floats or codes; scales, minimums: float32 [matrices, out_features, groups], of codes. The rest is
    QuantizedWeight's, but for ``width``: in_features where values are ``packed`` codes of 4 bits, uint8 [matrices,
    out_features, ceil(in_features / 2)]; else 0.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    group_size: int = 1
    rounded_together: int = 0  # elements of a row of x that share a scale; 0: x is not rounded
    has_row_scales: bool = False
    width: int = 0

    @classmethod
    def of(cls, weight: LinearWeight) -> Matrices:
        """One matrix. Its tensors are used as they are where they are contiguous."""
        return cls.stack(lambda _: weight, 1)

    @classmethod
    def stack(cls, weight_of: Callable[[int], LinearWeight], count: int) -> Matrices:
        """``count`` matrices; each is asked for once, and no second copy of all is made. Raises ConfigError where they
        are of unlike kinds."""
        first = weight_of(0)
        every = [None if part is None else part.contiguous().unsqueeze(0) for part in _tensors(first)]
        if count > 1:
            every = [None if part is None else part.new_empty(count, *part.shape[1:]) for part in every]
            for i in range(count):
                weight = first if i == 0 else weight_of(i)
                if _kind(weight) != _kind(first):
                    message = "experts of one layer are quantised in unlike ways, which the kernels do not multiply"
                    raise ConfigError("bits", f"{message}: set bits to fast, which makes floats of them")
                for place, part in zip(every, _tensors(weight), strict=True):
                    if place is not None and part is not None:
                        place[i].copy_(part)
        values, scales, minimums = every
        assert values is not None
        if not isinstance(first, QuantizedWeight):
            return cls(values)
        rounded = first.rounded_together if first.int8_activations else 0
        width = first.shape[1] if _is_packed(first) else 0
        return cls(values, scales, minimums, first.group_size, rounded, first.has_row_scales, width)

    @property
    def shape(self) -> tuple[int, int]:
        """Size of one matrix: (out_features, in_features)."""
        return self.values.shape[1], self.width or self.values.shape[2]

    @property
    def codes(self) -> bool:
        """Values are no floats."""
        return self.scales is not None

    @property
    def packed(self) -> bool:
        """Two codes lie in a byte."""
        return self.width > 0


def _tensors(weight: LinearWeight) -> list[torch.Tensor | None]:
    if not isinstance(weight, QuantizedWeight):
        return [weight, None, None]
    if weight.float4:
        raise ValueError("codes of FP4 have no kernel here: they become floats when they are loaded")
    codes = pack_codes(weight.codes) if _is_packed(weight) else weight.codes
    return [codes, weight.scales, weight.minimums]


def _is_packed(weight: QuantizedWeight) -> bool:
    """Whether its codes are kept in four bits: groups must begin at a byte's first code."""
    together = weight.rounded_together if weight.int8_activations else weight.group_size
    return weight.bits == 4 and (together % 2 == 0 or together >= weight.shape[1])


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """codes: int8 [rows, width], -8 to 7 -> uint8 [rows, ceil(width / 2)], the even one in a byte's low half; a code
    that is missing at the end is 0."""
    halves = F.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8) & 15
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def _kind(weight: LinearWeight) -> tuple[object, ...]:
    """Equal for weights that one launch can multiply."""
    tables = [None if part is None else (part.shape, part.dtype) for part in _tensors(weight)]
    if not isinstance(weight, QuantizedWeight):
        return (*tables,)
    return (*tables, weight.shape, weight.group_size, weight.int8_activations, weight.has_row_scales)


def product(
    x: torch.Tensor, matrices: Matrices, bias: torch.Tensor | None, out_dtype: torch.dtype, slabs: int = 1
) -> torch.Tensor:
    """One matrix. x: [T, in_features] -> [T, out_features]. bias: float32 [out_features]; slabs: see Linear, of whole
    groups where the weight has groups."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    columns, width = matrices.shape
    out = torch.empty(x.shape[0], columns, dtype=out_dtype, device=x.device)
    leaves = -(-(width // slabs) // LEAF)
    step = max(x.shape[0], 1)
    if slabs > 1:
        step = max(PARTIAL_BYTES // (4 * columns * slabs), 1)
    for start in range(0, x.shape[0], step):
        some, its_out = x[start : start + step], out[start : start + step]
        if matrices.rounded_together:
            _integers(some, matrices, bias, its_out, slabs)
        else:
            _sums(some, matrices, bias, its_out, slabs, leaves)
    return out


def _sums(
    x: torch.Tensor, matrices: Matrices, bias: torch.Tensor | None, out: torch.Tensor, slabs: int, leaves: int
) -> None:
    """Fills ``out``, contiguous. Leaves are programs of their own where the tiles alone are few."""
    (rows, columns), tile = out.shape, tile_of(x.shape[0], x.dtype, codes=matrices.codes)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    leaf_each = leaves > 1 and tiles * slabs < WANTED_PROGRAMS
    parts = slabs * leaves if leaf_each else slabs
    if parts == 1:
        _launch(x, matrices, bias, out, tile)
        return
    sums = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device)
    _launch(x, matrices, None, sums, tile, slabs=slabs, parts=parts)
    _merge(sums, bias, out, slabs)


def _merge(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, slabs: int) -> None:
    """Fills ``out``, contiguous. parts: float32, those of a slab together."""
    with on_device_of(out):
        products_triton._merge_kernel[(triton.cdiv(out.numel(), MERGE_BLOCK),)](
            parts, out.numel(), bias, out, COLUMNS=out.shape[1], COUNT=slabs, LEAVES=parts.shape[0] // slabs,
            BLOCK=MERGE_BLOCK, **EXACT,
        )  # fmt: skip


def heads_product(x: torch.Tensor, matrices: Matrices, out: torch.Tensor) -> None:
    """One matrix a head. x: [T, heads, in_features]; fills out: [T, heads, out_features]. Both may be slices of wider
    rows, elements together."""
    if out.numel():
        _launch(x, matrices, None, out, tile_of(x.shape[0], x.dtype, codes=matrices.codes), by_head=True)


def grouped_product(
    x: torch.Tensor,
    matrices: Matrices,
    bias: torch.Tensor | None,
    grouping: Grouping,
    out: torch.Tensor,
    sources: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
) -> None:
    """One matrix a row. Row r of ``grouping`` is x[sources[r]], and its product fills out[targets[r]].

    x: [?, in_features]; bias: float32 [matrices, out_features]; out: [?, out_features], contiguous; sources, targets:
    int64 [rows]; None: r itself. A row's bits are those of ``product`` with its matrix.
    """
    if not grouping.rows:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    if matrices.rounded_together:
        _integers(x, matrices, bias, out, 1, grouping, sources, targets)
    else:
        _launch(x, matrices, bias, out, grouping.tile, grouping=grouping, sources=sources, targets=targets)


def _launch(
    x: torch.Tensor,
    matrices: Matrices,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    *,
    slabs: int = 1,
    parts: int = 1,
    by_head: bool = False,
    grouping: Grouping | None = None,
    sources: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
) -> None:
    columns, width = matrices.shape
    rows, last = x.shape[0], 1 if grouping else matrices.values.shape[0] * parts
    tiles = grouping.tiles.shape[0] if grouping else triton.cdiv(rows, tile.rows)
    tables = matrices.scales
    if not rows:
        return
    with on_device_of(x):
        products_triton._product_kernel[(tiles, triton.cdiv(columns, tile.columns), last)](
            x, matrices.values, tables, matrices.minimums, bias, out,
            grouping and grouping.tiles, grouping and grouping.ends, sources, targets, rows,
            x.stride(0), x.stride(1) if by_head else 0, out.stride(0), out.stride(1) if by_head else 0,
            out.stride(0) if parts > 1 else 0,
            COLUMNS=columns, WIDTH=width, SLAB=width // slabs, LEAF=LEAF, PARTS=parts, LEAF_EACH=parts > slabs,
            PACKED=matrices.packed,
            GROUP=matrices.group_size, GROUPS=0 if tables is None else tables.shape[2],
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K[x.element_size()],
            num_warps=tile.warps, num_stages=stages_of(tile, x.element_size(), program_memory(x.device)), **EXACT,
        )  # fmt: skip


def _integers(
    x: torch.Tensor,
    matrices: Matrices,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    slabs: int,
    grouping: Grouping | None = None,
    sources: torch.Tensor | None = None,
    targets: torch.Tensor | None = None,
) -> None:
    """Fills ``out``. x is rounded once, whoever gets its rows."""
    (columns, width), rows, group = matrices.shape, x.shape[0], matrices.rounded_together
    groups = -(-width // group)
    if not rows:
        return
    codes = torch.empty(rows, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    sums = None if matrices.minimums is None else torch.empty_like(scales)
    tile = grouping.tile if grouping else tile_of(rows, x.dtype, codes=True)
    wide = FEW_COLUMNS if tile.rows == FEW.rows else tile.columns
    tiles = grouping.tiles.shape[0] if grouping else triton.cdiv(rows, tile.rows)
    sums_of_slabs = out
    if slabs > 1:
        sums_of_slabs = torch.empty(slabs, rows, columns, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        integer_triton._round_rows_kernel[(rows, groups)](
            x, x.stride(0), codes, scales, sums, LEAST_PEAK, WIDTH=width, GROUP=group, GROUPS=groups,
            BLOCK=next_power_of_2(group), **EXACT,
        )  # fmt: skip
        integer_triton._integer_kernel[(tiles, triton.cdiv(columns, wide), slabs)](
            codes, scales, sums, matrices.values, matrices.scales, matrices.minimums,
            None if slabs > 1 else bias, sums_of_slabs,
            grouping and grouping.tiles, grouping and grouping.ends, sources, targets, rows,
            sums_of_slabs.stride(-2), sums_of_slabs.stride(0) if slabs > 1 else 0,
            COLUMNS=columns, WIDTH=width, GROUP=group, GROUPS=groups,
            SLAB_GROUPS=groups // slabs, ROW_SCALES=matrices.has_row_scales, PACKED=matrices.packed,
            BLOCK_M=tile.rows, BLOCK_N=wide, BLOCK_K=min(max(next_power_of_2(group), 32), 128),
            num_warps=1 if wide == FEW_COLUMNS else tile.warps, num_stages=tile.stages, **EXACT,
        )  # fmt: skip
    if slabs > 1:
        _merge(sums_of_slabs, bias, out, slabs)
