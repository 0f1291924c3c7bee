"""Compiles Triton kernels for Hopper without a GPU: the interpreter does not check types, the compiler does."""

from __future__ import annotations

import importlib
import os
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
        options={"num_warps": call.num_warps, **EXACT},
    )
    return str(compiled.asm["ptx"])


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

CALLS = [
    KernelCall(PLACED, "_rows_kernel", "*i32 i32 *i64 *i64 *i64 *i64 *i64 i32 i32 i32", {"ROWS": 8}),
    KernelCall(PLACED, "_pages_kernel", "*i32 i32 *i64 *i64 *i32 *i32 *i32 i32 i32", {"SEGMENTS": 256, "PAGES": 256}),
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
