"""Compiles Triton kernels for Hopper without a GPU: the interpreter does not check types, the compiler does."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from paceline.triton_support import EXACT

CAPABILITY = 90


@dataclass(frozen=True)
class KernelCall:
    """A kernel, the types of its arguments in order (Triton's names; None: absent), and its compile-time values."""

    module: str
    kernel: str
    arguments: str  # separated by blanks; - is an argument that is None
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    instruction: str = ""  # the only matrix instruction that may be in its PTX; empty: anything may


def compile_call(call: KernelCall) -> str:
    """PTX. Raises triton's CompilationError."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(call.module), call.kernel)
    types = call.arguments.split()
    names = [name for name in kernel.arg_names if name not in call.constants]
    assert len(names) == len(types), (call.kernel, names, types)
    signature = dict.fromkeys(call.constants, "constexpr")
    constants = dict(call.constants)
    for name, kind in zip(names, types, strict=True):
        signature[name] = "constexpr" if kind == "-" else kind
        if kind == "-":
            constants[name] = None
    ordered = {name: signature[name] for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=ordered, constexprs=constants),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={"num_warps": call.num_warps, "num_stages": call.num_stages, **EXACT},
    )
    ptx = str(compiled.asm["ptx"])
    found = set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)[a-z0-9_.]*", ptx))
    assert not call.instruction or found == {call.instruction}, (call.kernel, call.constants, found)
    return ptx


SAMPLING = "paceline.sampling.kernels_triton"
BLOCK = 2048
RACE = "*fp32 i32 {map} *i32 i32 *fp64 i32 {floors} {cuts} i32 *fp32 *i32 *fp64 *i32 i32 i32"
WIDE = {"CHUNKS": 64, "MARGIN": 1.001, "BLOCK": BLOCK}

PAGES = "paceline.kvcache.pages_triton"
TILE = {"WORDS": 4, "TOKENS": 8, "UNITS": 256, "EVEN": 2}

LAYERS = "paceline.layers.ops_triton"
ROPE = "{0} {0} {0} *fp32 *i64 *i64 {0} {0} i32 i32 i32 i32 i32 i32 i32 i64 i64 i32 i32 i64"
GQA_SHAPE = {"HEADS": 32, "KV_HEADS": 8, "DIM": 96, "PAIRS": 64, "GROUP": 8}
LATENT = "{0} {0} {0} *fp32 *i64 *i64 {0} {0} i32 i32 i32 i32 i64 i32 i32 i64 fp32"
MLA_SHAPE = {"HEADS": 128, "RANK": 512, "ROPE": 64, "EVEN": 8, "BLOCK": 512, "PAIRS": 32, "GROUP": 16}
HIDDEN = {"HEADS": 1, "WIDTH": 4096, "EVEN": 8, "BLOCK": 4096}

PLACED = "paceline.attention.placed_triton"

ATTENTION = "paceline.attention.triton_kernels"
ATTEND = "{0} {0} *i32 *i32 *i32 *fp32 *fp32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 fp32"
FINISH = "*fp32 *fp32 *i32 {0} *bf16 i32 i32 i32 i32 i32 i32 i32"


def attend_call(pointer: str, *geometry: int) -> KernelCall:
    """Attention of a geometry (group, key, rope, value, bytes of an element), launched as the backend does."""
    from paceline.attention.triton_paged import Geometry

    options = {name: value for name, value in Geometry(*geometry).options.items() if name not in EXACT}
    warps, stages = options.pop("num_warps"), options.pop("num_stages")
    return KernelCall(ATTENTION, "_attend_kernel", ATTEND.format(pointer), options, warps, stages)


PRODUCTS = "paceline.layers.products_triton"
EXPERTS = "paceline.layers.experts_triton"
INTEGERS = "paceline.layers.integer_triton"
# One instruction in every tile of a kind of weight, or bits would differ.
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
PRODUCT = "*{x} *{w} {tables} *fp32 {out} {rows} i32 i32 i32 i32 i32 i32"
INTEGER = "*i8 *fp32 *fp32 {w} *fp32 {minimums} - *bf16 {rows} i32 i32 i32"
PLAIN, GROUPED = "- - - -", "*i32 *i32 *i64 *i64"
O_PROJ = {"COLUMNS": 4096, "WIDTH": 4096, "SLAB": 512, "LEAF": 1024, "PARTS": 8, "LEAF_EACH": False}
QKV = {"COLUMNS": 6144, "WIDTH": 4096, "SLAB": 4096, "LEAF": 1024, "PARTS": 4, "LEAF_EACH": True}
WHOLE = {"COLUMNS": 2000, "WIDTH": 2080, "SLAB": 2080, "LEAF": 1024, "PARTS": 1, "LEAF_EACH": False}
DENSE, FLOAT8, GROUPS_OF_32 = ({"GROUP": g, "GROUPS": n} for g, n in ((1, 0), (128, 32), (32, 65)))


def product(
    x: str, weight: str, tables: str, rows: str, columns: str, tile: tuple[int, int], *sizes: dict[str, Any]
) -> KernelCall:
    """A call of the exact products. tile: rows and warps, as layers/exact_products.py pairs them."""
    floats = x == weight == "bf16"
    block = {"BLOCK_M": tile[0], "BLOCK_N": 128 if floats else 64, "BLOCK_K": 64 if x == "bf16" else 32}
    arguments = PRODUCT.format(x=x, w=weight, tables=tables, rows=rows, out=columns)
    constants = {name: value for size in sizes for name, value in size.items()} | block | {"PACKED": weight == "u8"}
    instruction = "" if x != "bf16" else WGMMA if floats else MMA
    return KernelCall(PRODUCTS, "_product_kernel", arguments, constants, tile[1], instruction=instruction)


def integer(weight: str, rows: str, tile: tuple[int, int, int], group: int) -> KernelCall:
    """A call of the products of integers, with minimums. tile: rows, columns, warps."""
    groups = -(-4000 // group)
    constants: dict[str, Any] = {"COLUMNS": 768, "WIDTH": 4000, "GROUP": group, "GROUPS": groups, "SLAB_GROUPS": groups}
    constants |= {"ROW_SCALES": False, "PACKED": weight == "*u8"}
    constants |= {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": min(max(group, 32), 128)}
    arguments = INTEGER.format(w=weight, minimums="*fp32", rows=rows)
    return KernelCall(INTEGERS, "_integer_kernel", arguments, constants, num_warps=tile[2])


CALLS = [
    KernelCall(PLACED, "_rows_kernel", "*i32 i32 *i64 *i64 *i64 *i64 *i64 i32 i32 i32", {"ROWS": 8}),
    KernelCall(PLACED, "_pages_kernel", "*i32 i32 *i64 *i64 *i32 *i32 *i32 i32 i32", {"SEGMENTS": 256, "PAGES": 256}),
    KernelCall(PLACED, "_reads_kernel", "*i64 *i64 *i32 i32 i32 i32", {"ROWS": 8}),
    attend_call("*bf16", 4, 128, 0, 128, 2),
    attend_call("*bf16", 128, 512, 64, 512, 2),
    KernelCall(
        ATTENTION,
        "_finish_kernel",
        FINISH.format("*fp32"),
        {"VALUE": 64, "BLOCK_VALUE": 64, "SPLIT": 256, "ITEMS": 8, "AHEAD": 4},
    ),
    product("bf16", "bf16", "- -", PLAIN, "*fp32", (64, 4), QKV, DENSE),
    product("bf16", "bf16", "- -", PLAIN, "*fp32", (128, 8), O_PROJ, DENSE),
    product("bf16", "bf16", "- -", GROUPED, "*bf16", (64, 4), WHOLE, DENSE),
    product("bf16", "fp8e4nv", "*fp32 -", GROUPED, "*bf16", (16, 4), QKV | {"PARTS": 1, "LEAF_EACH": False}, FLOAT8),
    product("bf16", "i8", "*fp32 *fp32", PLAIN, "*bf16", (16, 4), WHOLE, GROUPS_OF_32),
    product("bf16", "u8", "*fp32 *fp32", PLAIN, "*bf16", (16, 4), WHOLE, GROUPS_OF_32),
    product("bf16", "u8", "*fp32 *fp32", PLAIN, "*fp32", (32, 4), O_PROJ, GROUPS_OF_32),
    product("bf16", "u8", "*fp32 -", GROUPED, "*bf16", (64, 2), QKV | {"PARTS": 1, "LEAF_EACH": False}, FLOAT8),
    product("fp32", "u8", "*fp32 *fp32", PLAIN, "*fp32", (16, 4), WHOLE, GROUPS_OF_32),
    product("fp32", "fp32", "- -", PLAIN, "*fp32", (16, 4), WHOLE, DENSE),
    KernelCall(
        PRODUCTS, "_merge_kernel", "*fp32 i32 *fp32 *bf16", {"COLUMNS": 4096, "COUNT": 8, "LEAVES": 2, "BLOCK": 1024}
    ),
    KernelCall(PRODUCTS, "_tiles_kernel", "*i32 *i32", {"MATRICES": 160, "BLOCK_M": 16, "COUNT": 256, "BLOCK": 32}),
    KernelCall(
        INTEGERS,
        "_round_rows_kernel",
        "*bf16 i32 *i8 *fp32 *fp32 fp32",
        {"WIDTH": 4000, "GROUP": 64, "GROUPS": 63, "BLOCK": 64},
    ),
    integer("*i8", GROUPED, (16, 16, 1), 64),
    integer("*u8", GROUPED, (16, 16, 1), 64),
    integer("*u8", PLAIN, (32, 64, 4), 32),
    integer("*u8", PLAIN, (64, 64, 2), 128),
    KernelCall(
        EXPERTS,
        "_route_kernel",
        "*fp32 *fp32 *i64 *fp32 fp32",
        {
            "EXPERTS": 256,
            "GROUPS": 8,
            "TOP_GROUPS": 4,
            "TOP_K": 8,
            "NORMALISE": True,
            "SOFTMAX": False,
            "BLOCK_G": 8,
            "BLOCK_S": 32,
            "BLOCK_K": 8,
        },
        num_warps=1,
    ),
    KernelCall(
        EXPERTS,
        "_route_kernel",
        "*fp32 - *i64 *fp32 fp32",
        {
            "EXPERTS": 60,
            "GROUPS": 1,
            "TOP_GROUPS": 1,
            "TOP_K": 4,
            "NORMALISE": False,
            "SOFTMAX": True,
            "BLOCK_G": 1,
            "BLOCK_S": 64,
            "BLOCK_K": 4,
        },
        num_warps=1,
    ),
    KernelCall(EXPERTS, "_by_expert_kernel", "*i64 *i64 *i64 *i64 *i32 i32", {"TOP_K": 8, "BLOCK": 1024}),
    KernelCall(EXPERTS, "_put_rows_kernel", "*bf16 *i64 *fp32", {"WIDTH": 7168, "BLOCK": 1024}),
    KernelCall(EXPERTS, "_weighted_sum_kernel", "*fp32 *fp32 *fp32", {"TOP_K": 8, "WIDTH": 7168, "BLOCK": 1024}),
    KernelCall(LAYERS, "_rms_norm_kernel", "*bf16 *bf16 *bf16 *bf16 i32 i32 fp32", {"ADD": True, **HIDDEN}, 8),
    KernelCall(
        LAYERS,
        "_rms_norm_kernel",
        "*fp32 - *fp32 *fp32 i32 i32 fp32",
        {"ADD": False, "HEADS": 5, "WIDTH": 100, "EVEN": 4, "BLOCK": 128},
    ),
    KernelCall(LAYERS, "_silu_mul_kernel", "*bf16 i32 *bf16", {"WIDTH": 14336, "BLOCK": 1024}),
    KernelCall(LAYERS, "_silu_mul_kernel", "*fp16 i32 *fp16", {"WIDTH": 20, "BLOCK": 32}),
    KernelCall(LAYERS, "_add_slabs_kernel", "*fp32 i32 *fp32 *bf16", {"WIDTH": 4096, "COUNT": 8, "BLOCK": 1024}),
    KernelCall(LAYERS, "_add_slabs_kernel", "*fp32 i32 - *fp32", {"WIDTH": 576, "COUNT": 3, "BLOCK": 1024}),
    KernelCall(LAYERS, "_rope_write_kernel", ROPE.format("*bf16"), GQA_SHAPE),
    KernelCall(LAYERS, "_rope_write_kernel", ROPE.format("*fp32"), GQA_SHAPE),
    KernelCall(LAYERS, "_latent_write_kernel", LATENT.format("*bf16"), MLA_SHAPE),
    KernelCall(LAYERS, "_latent_write_kernel", LATENT.format("*fp16"), MLA_SHAPE),
    KernelCall(SAMPLING, "_noise_kernel", "*i32 *i32 *i64 i32", {"BLOCK": BLOCK}),
    KernelCall(SAMPLING, "_edit_kernel", "*fp32 *fp32 i32 *i32 *i32", {"LIST": 5, "WORDS": 11, "BLOCK": 256}),
    KernelCall(
        SAMPLING,
        "_best_kernel",
        "*fp32 i32 *fp64 i32 *fp32 *i32 *fp32 i32 i32",
        {"WITH_SUM": True, "BLOCK": BLOCK},
        num_warps=8,
    ),
    KernelCall(
        "paceline.sampling.triton_cut",
        "_cut_kernel",
        "*fp32 i32 *i32 *fp64 *i32 *fp32 i32 i32",
        {
            "NUMBERS": 3,
            "TEMPERATURE": 0,
            "MASS_LIMIT": 1,
            "WORDS": 11,
            "TOP_K": 2,
            "CUT_KEY": 3,
            "CUT_ID": 4,
            "CHUNKS": 64,
            "BLOCK": 4096,
        },
        num_warps=16,
    ),
    KernelCall(
        SAMPLING,
        "_race_kernel",
        RACE.format(map="-", floors="*fp64", cuts="*i32"),
        {"HAS_MAP": False, "RACED": 1, "CUT": True, "WIDTH": 1, **WIDE},
        num_warps=8,
    ),
    KernelCall(
        SAMPLING,
        "_race_kernel",
        RACE.format(map="*i64", floors="-", cuts="-"),
        {"HAS_MAP": True, "RACED": 1, "CUT": False, "WIDTH": 4, **WIDE},
        num_warps=8,
    ),
    KernelCall(SAMPLING, "_token_kernel", "*fp32 *fp64 *i32 *i64 i32", {"CHUNKS": 64}),
    KernelCall(
        SAMPLING,
        "_topk_kernel",
        "*fp32 i32 *i64 *fp64 i32 *fp32 *fp32 *fp64 *i32 *i64 *fp32 i32",
        {"HAS_MAP": True, "WIDTH": 4, "CHUNKS": 64, "ENTRIES": 256},
    ),
    KernelCall(
        "paceline.spec_decode.accept.walk_triton",
        "_walk_kernel",
        "*i32 *i32 *i32 *i32 *i32 *i32 *i64 *i32 i32",
        {"PATH": 3, "STOP": 1, "TOO_LONG": 2, "NODES": 64, "STOPS": 16},
        num_warps=1,
    ),
    KernelCall(PAGES, "_move_kernel", "*i64 i32 *i64 *i64 *i64 i32 i32 i32", {"TO_FLAT": True, **TILE}),
    KernelCall(PAGES, "_move_kernel", "*i64 i32 *i16 *i32 *i16 i32 i32 i32", {"TO_FLAT": False, **TILE}),
    KernelCall(
        PAGES,
        "_compact_kernel",
        "*i64 i32 *i64 *i32 *i32 *i32 i32 *i32 i32 i32",
        {"WORDS": 4, "UNITS": 512},
    ),
]


def main() -> None:
    """Compile the kernels named on the command line, or all."""
    for call in CALLS:
        if not sys.argv[1:] or call.kernel in sys.argv[1:]:
            ptx = compile_call(call)
            print(call.kernel, len(ptx), flush=True)
            if folder := os.environ.get("PTX_FOLDER"):
                with open(f"{folder}/{call.kernel}-{call.constants.get('WIDTH', '')}.ptx", "w") as file:
                    file.write(ptx)


if __name__ == "__main__":
    main()
