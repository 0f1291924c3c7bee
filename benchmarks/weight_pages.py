"""``python -m benchmarks.weight_pages [--model ...] [--quantize ...]``: what two nodes of a host gain from weights that
they share, and from huge pages under these.

Two processes share their weights in huge pages, two share theirs in small pages, and two have weights of their own.
All six load the same model first. Then they decode one after another, in another order in each round, while the others
rest. A ratio is that of two steps of one round. The last lines say what huge pages on demand cost when a node starts.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.engine import decode_step_s
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.host_memory import host_zeros
from paceline.huge_pages import HUGE_PAGE, ReadableMap
from paceline.layers.weight_file import WeightFile
from paceline.long_lived import settle
from paceline.models.hub import resolve_model

HUGE, SMALL, OWN = KINDS = ("shared, huge pages", "shared, small pages", "own")
NODES = 2  # processes of each kind
STEPS = 40
MOVED = 512 * HUGE_PAGE  # bytes whose move into huge pages is timed


@dataclass(frozen=True)
class Figures:
    """One kind of weights."""

    kind: str
    pss: int  # bytes of its processes together
    step_ms: float  # the least of the rounds' medians: what else runs only slows a step down
    over_own: float  # the median ratio of a step to one of a process with weights of its own


class Node:
    """A process with the model; it answers each line with a step's seconds."""

    def __init__(self, kind: str, path: str, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "benchmarks.weight_pages", *options, "--kind", kind, "--weight-file", path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.step_s()

    def step_s(self) -> float:
        """Median seconds of a decode step. Raises ValueError when the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def pss(self) -> int:
        """Bytes, with its part of what it shares."""
        return int(psutil.Process(self._process.pid).memory_full_info().pss)

    def end(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.communicate()


def decode(config: NodeConfig, kind: str) -> None:
    """Be a node until there are no more lines."""
    with ExitStack() as stack:
        if kind == SMALL:
            stack.enter_context(mock.patch.object(ReadableMap, "collapse", return_value=0))
        runner = build_runner(config, decodes=False)
    settle()
    for _ in sys.stdin:
        print(decode_step_s(runner, STEPS), flush=True)


def measure(options: Sequence[str], rounds: int) -> list[Figures]:
    """All kinds by turns. options: of each node."""
    with ExitStack() as stack:
        nodes: list[tuple[str, Node]] = []
        parts = len(KINDS) * NODES + rounds * NODES
        for kind in KINDS:
            file = WeightFile()
            stack.callback(file.close)
            for _ in range(NODES):
                step(len(nodes), parts, f"loading weights: {kind}")
                node = Node(kind, "" if kind == OWN else file.path, options)
                stack.callback(node.end)
                nodes.append((kind, node))
        pss = {kind: sum(node.pss() for of, node in nodes if of == kind) for kind in KINDS}
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds * NODES):
            step(len(nodes) + number, parts, "decode steps of each kind")
            first = number % len(KINDS)
            for kind in (*KINDS[first:], *KINDS[:first]):
                here = [node for of, node in nodes if of == kind]
                steps[kind].append(here[number % NODES].step_s())
    found = []
    for kind in KINDS:
        ratios = [one / own for one, own in zip(steps[kind], steps[OWN], strict=True)]
        found.append(Figures(kind, pss[kind], 1e3 * min(steps[kind]), statistics.median(ratios)))
    return found


def move_s() -> tuple[float, float]:
    """Seconds to move MOVED bytes into huge pages, and to write as many for the first time."""
    file = os.memfd_create("paceline-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, MOVED)
        with mmap.mmap(file, MOVED) as written:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(written)), 1, MOVED)
        mapped = ReadableMap(file, MOVED)
        began = time.perf_counter()
        failed = mapped.collapse(MOVED)
        moved = time.perf_counter() - began
    finally:
        os.close(file)
    if failed:
        raise OSError(failed, "this host makes no huge pages of memory files")
    began = time.perf_counter()
    host_zeros(MOVED).fill_(1)
    return moved, time.perf_counter() - began


def show(found: Sequence[Figures]) -> None:
    """Print a table."""
    table = Table(title=f"{NODES} processes of each kind")
    for column in ("weights", "PSS, MB", "step, ms", "over own"):
        table.add_column(column, justify="left" if column == "weights" else "right")
    for one in found:
        table.add_row(one.kind, f"{one.pss / 1e6:.0f}", f"{one.step_ms:.2f}", f"{one.over_own:.3f}")
    Console(width=120).print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--weight-file", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.kind:
        options = {"model": given.model, "quantize": given.quantize, "threads": given.threads, "drafter": "none"}
        options |= {"kv_cache_tokens": 4096, "prefix_cache": False, "weight_file": given.weight_file}
        decode(NodeConfig.model_validate(options), given.kind)
        return
    model = str(resolve_model(given.model))
    of_nodes = ["--model", model, "--quantize", given.quantize, "--threads", str(given.threads)]
    found = measure(of_nodes, given.rounds)
    show(found)
    moved, written = move_s()
    print(f"{MOVED >> 20} MiB move into huge pages in {moved:.2f} s; writing as many takes {written:.2f} s")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
