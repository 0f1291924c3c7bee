"""``python -m benchmarks.start [--repeats N] [options of paceline serve]``: how long ``serve`` takes to be ready, where
that time goes, and how much memory all of its processes have once they rest.

Seconds run from the start of the command to its line ``ready``; phases are those that ``--verbose`` logs. Memory is
read when it has stopped changing: the process that stands by has its modules then.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.common.processes import FREE_PORTS, PACELINE

COMMAND = (*PACELINE, "serve", "--verbose")
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
POLL_S = 1.0
STEADY_POLLS = 4  # polls in a row within STEADY_BYTES of each other
STEADY_BYTES = 10_000_000
SETTLE_TIMEOUT_S = 60.0
PHASE = re.compile(r" ([\w-]+) (?:INFO|WARNING) \S+: phase (.+): ([\d.]+) s$")


@dataclass(frozen=True)
class Resident:
    """Memory of one process, bytes. ``uss`` is its own alone; ``pss`` adds its share of what it shares."""

    name: str
    pid: int
    pss: int
    uss: int


@dataclass(frozen=True)
class Start:
    """One start of a deployment."""

    ready_s: float
    cpu_s: float  # processor seconds that all processes had used by then: what a busy machine does not change
    phases: dict[str, float] = field(default_factory=dict)  # seconds by "process: phase"; processes run side by side
    processes: tuple[Resident, ...] = ()

    @property
    def pss(self) -> int:
        """Bytes of all processes together."""
        return sum(process.pss for process in self.processes)


def measure(options: Sequence[str]) -> Start:
    """Start ``paceline serve`` with ``options``, read its times and memory, stop it. Raises RuntimeError with the end
    of its log when it does not become ready."""
    with tempfile.TemporaryDirectory(prefix="paceline-start-") as folder:
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("w") as errors:
            server = subprocess.Popen(
                [*COMMAND, *FREE_PORTS, *options], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        try:
            assert server.stdout is not None
            if not server.stdout.readline().startswith("ready"):
                raise RuntimeError(f"it did not become ready:\n{log.read_text()[-3000:]}")
            ready_s = time.monotonic() - began
            cpu_s = used_cpu(server.pid)
            processes = settled(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.wait(STOP_TIMEOUT_S)
            server.kill()
            server.wait()
        return Start(ready_s, cpu_s, phases(log.read_text()), processes)


def settled(pid: int) -> tuple[Resident, ...]:
    """The processes of the tree below ``pid`` once the sum of their memory rests, largest first."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    sums: list[int] = []
    while True:
        processes = tree(pid)
        sums = [*sums[-STEADY_POLLS + 1 :], sum(process.pss for process in processes)]
        if (len(sums) == STEADY_POLLS and max(sums) - min(sums) < STEADY_BYTES) or time.monotonic() > deadline:
            return processes
        time.sleep(POLL_S)


def used_cpu(pid: int) -> float:
    """Processor seconds of a process and all below it."""
    total = 0.0
    here = psutil.Process(pid)
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def tree(pid: int) -> tuple[Resident, ...]:
    """A process and all below it, largest first."""
    found = []
    here = psutil.Process(pid)
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError):
            memory = process.memory_full_info()
            found.append(Resident(_name(process), process.pid, memory.pss, memory.uss))
    return tuple(sorted(found, key=lambda process: -process.pss))


def _name(process: psutil.Process) -> str:
    command = process.cmdline()
    if not command:
        return process.name()
    if command[0].startswith("ray::"):
        return command[0]
    scripts = [Path(word).name for word in command if word.endswith(".py")]
    return scripts[0] if scripts else Path(command[0]).name + (" serve" if "serve" in command else "")


def phases(log: str) -> dict[str, float]:
    """Seconds of what the log calls a phase, by process and name."""
    matches = (PHASE.search(line) for line in log.splitlines())
    return {f"{match[1]}: {match[2]}": float(match[3]) for match in matches if match}


def show(starts: Sequence[Start]) -> None:
    """Print medians over all starts; processes are those of the last."""
    console = Console()
    times, totals = [s.ready_s for s in starts], [s.pss for s in starts]
    console.print(
        f"ready after {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, {len(starts)} starts), "
        f"{statistics.median(s.cpu_s for s in starts):.1f} s of processor time, "
        f"{statistics.median(totals) / 1e9:.2f} GB PSS"
    )
    table = Table(title="phases, median seconds")
    table.add_column("process: phase")
    table.add_column("s", justify="right")
    for name in starts[-1].phases:
        table.add_row(name, f"{statistics.median(s.phases.get(name, 0.0) for s in starts):.2f}")
    console.print(table)
    table = Table(title="memory of the last start, MB")
    for column in ("process", "PSS", "USS"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for process in starts[-1].processes:
        table.add_row(process.name, f"{process.pss / 1e6:.0f}", f"{process.uss / 1e6:.0f}")
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON instead")
    given, options = parser.parse_known_args()
    starts = []
    for number in range(given.repeats):
        step(number, given.repeats, "starting paceline serve")
        starts.append(measure(options))
    if given.json:
        print(json.dumps([asdict(start) for start in starts], indent=1))
    else:
        show(starts)


if __name__ == "__main__":
    main()
