"""What a GPU has to show first, in order: the stages of ``python -m benchmarks.gpu.tour``."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = (sys.executable, "-u")
TESTS = Path("tests/gpu")
# Warnings are errors in the repository's own runs; another machine has other versions of what warns.
PYTEST = ("-m", "pytest", "-v", "--tb=short", "-rf", "-p", "no:cacheprovider", "--timeout=150", "-W", "default")
# Tests of one GPU run beside each other where pytest-xdist is there: they wait for Triton's compiler more than for it.
AT_ONCE = ("-n", "8") if importlib.util.find_spec("xdist") else ()
TABLE_ROWS = (
    "decode_b1,decode_b64,verify_b1,verify_b32,draft_step,round_overhead,speedup_b1,speedup_b32,prefill_4k,pages"
)
SMALL_ROWS = "qwen_decode_b1,qwen_verify_b1,qwen_round,qwen_speedup_b1"
QUESTIONS = ("products", "bits", "experts", "prompts", "profile")
EXACT_ROWS = "exact_decode_b1,exact_decode_b64,exact_prefill_4k"


@dataclass(frozen=True)
class Stage:
    """One command, from the root of the repository."""

    name: str
    shows: str
    limit_s: float  # after which it is stopped; what it printed and wrote is kept
    command: tuple[str, ...]  # OUT stands for the folder of results
    on_cpu: tuple[str, ...] | None  # what stands for it on a host without a GPU; None: nothing
    least_s: float = 30.0  # it is not begun with less time than this
    beside: bool = False  # runs beside those that follow, up to the stage ``until``
    until: str = ""


def _tests(*names: str, only: str = "", at_once: tuple[str, ...] = AT_ONCE) -> tuple[str, ...]:
    chosen = ("-k", only) if only else ()
    return (*PYTHON, *PYTEST, *at_once, "-m", "gpu", *chosen, *(str(TESTS / name) for name in names))


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (*PYTHON, "-m", f"benchmarks.gpu.{name}", *arguments)


def _rows(rows: str, minutes: float, out: str, *more: str) -> tuple[str, ...]:
    return (*PYTHON, "-m", "benchmarks.gpu", "--rows", rows, "--minutes", f"{minutes:g}", "--out", f"OUT/{out}", *more)


TINY = ("--device", "cpu", "--dtype", "fp32", "--target", "tiny", "--sample-seconds", "0.01", "--no-transformers")
STAGES = (
    Stage("machine", "versions, memory, both ceilings", 60,
          _module("probes", "--only", "machine", "--out", "OUT/probes.json"), None),
    Stage("kernels", "FlashInfer's kernels compile, and are kept", 560,
          _module("kernels", "--keep", "OUT/kernels.tar.xz"), None, beside=True, until="flashinfer"),
    Stage("ops", "layer operations, pages, sampling, walk and rounds on the device", 150,
          _tests("test_layer_ops.py", "test_device_pages.py", "test_device_sampling.py", "test_device_walk.py",
                 "test_device_rounds.py"), None),
    Stage("attention", "Triton attention: references, bits of a row, engines", 150,
          _tests("test_triton_attention.py"), None),
    Stage("exact", "exact products and bits of engines", 120,
          _tests("test_exact_products.py", "test_exact_bits.py"), None),
    Stage("graphs", "CUDA graphs in fp32", 120, _tests("test_graphs.py", only="not flashinfer"), None),
    Stage("flashinfer", "FlashInfer in bf16, in graphs too", 150,
          _tests("test_flashinfer.py", "test_graphs.py", only="flashinfer and not float16 and not 256"), None),
    Stage("engines", "every drafter gives the text of plain decoding", 180, _tests("test_engine_equality.py"), None),
    Stage("links", "rows that leave and land beside a step, NCCL between two processes, a killed peer", 150,
          _tests("test_sending.py", "test_landing.py", "test_nccl_transport.py", "test_nccl_handoff.py", at_once=()),
          (*PYTHON, *PYTEST, "tests/test_phases.py")),  # a small file: that pytest takes these options
    Stage("rows", "the table of the benchmark", 420, _rows(TABLE_ROWS, 6.8, "rows.json"),
          _rows("decode_b1", 1, "rows.json", *TINY), least_s=90),
    Stage("small", "the small shape, where the host shows", 150,
          _rows(SMALL_ROWS, 2.3, "small.json"), None, least_s=60),
    Stage("bits", "what exact bits cost", 200, _rows(EXACT_ROWS, 3.2, "exact.json"), None, least_s=60),
    Stage("probes", "products over numbers of rows, experts, FA2 beside FA3, bits, a profile", 170,
          _module("probes", "--only", *QUESTIONS, "--out", "OUT/probes.json"),
          _module("probes", "--device", "cpu", "--out", "OUT/probes.json")),
)  # fmt: skip
