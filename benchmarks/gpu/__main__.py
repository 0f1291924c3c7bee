"""``python -m benchmarks.gpu``: what one GPU does with Paceline, against what it could do (docs/guides/gpu.md).

Plain processes, no Ray, no network. Targets have the shape of public ones and random weights; heads whose acceptance is
synthetic are labelled so everywhere. The JSON is rewritten after every row, so a run that is cut short leaves what it
had.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu.bench import Bench, Options, Unavailable
from benchmarks.gpu.clock import LIMIT_S, Clock, measure_ceilings
from benchmarks.gpu.report import Host, Result, table, to_json
from benchmarks.gpu.rows import Row, fit, rows, select
from benchmarks.gpu.shapes import SHAPES
from benchmarks.speculation.synthetic import RATES, Rates
from paceline.assembly.build import set_queues
from paceline.attention.flashinfer_kernels import load_flashinfer
from paceline.errors import ConfigError
from paceline.layers.build import set_threads
from paceline.models.registry import DTYPES
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)

RESULTS = Path(__file__).parents[1] / "results"
TABLE_WIDTH = 180  # a log file has no width of its own
PACE = (0.3, 4.0)  # bounds of measured over estimated seconds: few rows say little


def measure(
    bench: Bench,
    asked: Sequence[Row],
    seconds: float,
    told: Callable[[list[Result]], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Result]:
    """Every row that fits into ``seconds``, and the reason for every other; ``told`` after each, with all so far."""
    end, waiting, results = clock() + seconds, list(asked), []
    spent = estimated = 0.0
    while waiting:
        pace = min(max(spent / estimated, PACE[0]), PACE[1]) if estimated else 1.0
        waiting, dropped = fit(waiting, end - clock(), pace)
        for row in dropped:
            results.append(Result(row, None, f"dropped: about {pace * row.estimate_s:.0f} s, no time left for it"))
        if waiting:
            row, began = waiting.pop(0), clock()
            results.append(_measure(bench, row, clock))
            if results[-1].row is not asked[0]:  # which loads the target and compiles kernels for all others
                spent, estimated = spent + clock() - began, estimated + row.estimate_s
        told(results)
    order = {row.key: i for i, row in enumerate(asked)}
    return sorted(results, key=lambda result: order[result.row.key])


def _measure(bench: Bench, row: Row, clock: Callable[[], float]) -> Result:
    """A row that fails takes no other with it."""
    began = clock()
    try:
        figure, missing = row.measure(bench), ""
    except Unavailable as reason:
        figure, missing = None, f"not measured: {reason}"
    except Exception as error:
        log.exception("row %s failed", row.key)
        figure, missing = None, f"FAILED: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if fell_back := bench.fell_back():
        figure, missing = None, f"FAILED: fell back: {'; '.join(fell_back)}"
    bench.free()
    return Result(row, figure, missing, clock() - began)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--rows", default="", help="keys, or the groups table and sweep, separated by commas; default all"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and their reaches, measure nothing")
    parser.add_argument("--minutes", type=float, default=9.0, help="at most; large points are dropped first")
    parser.add_argument("--sample-seconds", type=float, default=LIMIT_S, help="of one timed figure")
    parser.add_argument("--device", default="cuda", help="cpu is for a look, with --target tiny")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--target", choices=sorted(SHAPES), default="llama-8b", help="shape of the random target")
    parser.add_argument("--smollm2", default="", help="folder of SmolLM2-135M-Instruct, for its rows")
    parser.add_argument("--rates", default="tau3", help=f"{', '.join(RATES)}, or rates separated by commas")
    parser.add_argument(
        "--attention",
        choices=("flashinfer", "triton", "torch"),
        default="flashinfer",
        help="on a GPU; where the one that is asked for cannot run, nothing is measured",
    )
    parser.add_argument(
        "--bits", choices=("fast", "exact"), default="fast", help="exact takes an attention of its own on a GPU"
    )
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help=f"JSON to write; default {RESULTS}/gpu-DEVICE.json")
    return parser.parse_args(arguments)


def parse_rates(text: str) -> Rates:
    """A name of RATES, or the rates themselves. Raises ConfigError."""
    if text in RATES:
        return RATES[text]
    try:
        return Rates(tuple(float(rate) for rate in text.split(",")))
    except ValueError as error:
        raise ConfigError("rates", f"{text!r}: {error}; or one of {', '.join(RATES)}") from None


def check_attention(device: torch.device, wanted: str) -> None:
    """Figures of another backend would say nothing. Raises ConfigError where ``wanted`` cannot run, and without Triton,
    which layers and sampling take whatever the attention is."""
    if wanted == "flashinfer":
        load_flashinfer()
    if not runs_triton(device):
        raise ConfigError("attention", "triton is not installed: layers and sampling would be torch's")


def run(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """The command; returns its exit code: 1 when a reach is missed, a text was wrong or a row failed. Raises
    ConfigError."""
    given, console = parse(arguments), console or Console(width=TABLE_WIDTH, no_color=True)
    asked = select(rows(given.target), given.rows)
    if given.list:
        for row in asked:
            console.print(f"{row.key:16} {row.title}  {row.reach or ''}")
        return 0
    device = torch.device(given.device)
    set_queues(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda needs a CUDA build of torch and a GPU; --device cpu goes with --target tiny")
    if device.type == "cuda":
        check_attention(device, "triton" if given.bits == "exact" else given.attention)
    set_threads(torch.get_num_threads())
    options = Options(
        given.device, given.dtype, given.target, given.smollm2, given.seed, parse_rates(given.rates),
        not given.no_transformers, given.attention if device.type == "cuda" else "auto", given.bits,
    )  # fmt: skip
    host = Host.read(device)
    out = given.out or RESULTS / f"gpu-{host.device.lower().replace(' ', '-')}.json"
    began = time.monotonic()
    clock = Clock(device, given.sample_seconds)
    ceilings = measure_ceilings(clock, DTYPES[given.dtype])
    with tempfile.TemporaryDirectory(prefix="paceline-heads-") as scratch:
        bench = Bench(options, clock, ceilings, Path(scratch))

        def told(results: list[Result]) -> None:
            out.write_text(to_json(results, options, ceilings, host) + "\n", encoding="utf-8")
            last = results[-1]
            said = last.missing if last.figure is None else f"{last.figure.value:.3f} {last.row.unit} {last.verdict}"
            console.print(f"{time.monotonic() - began:6.0f} s  {last.row.key}: {said}", highlight=False)

        results = measure(bench, asked, 60 * given.minutes - (time.monotonic() - began), told)
    out.write_text(to_json(results, options, ceilings, host) + "\n", encoding="utf-8")
    console.print(table(results, options, ceilings, host))
    console.print(f"written: {out}")
    bad = any(result.verdict in ("MISSED", "WRONG") or result.missing.startswith("FAILED") for result in results)
    return 1 if bad else 0


def main() -> None:
    """Entry point."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(run())
    except ConfigError as error:
        print(f"error --{error.key.replace('_', '-')}: {error.message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
