"""What every process of a deployment holds while it serves: memory, open files, threads.

Private memory (USS) is what would come back if the process ended; resident memory (RSS) counts pages of files and of
shared memory as well, which grow as they are touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

MIB = 2**20
EVERY_S = 2.0
FEWEST_SAMPLES = 8  # for a slope
# Over 5,000 requests no process was measured above 0.4 MiB by 1,000. 1 MiB is 1 KiB that each request leaves behind.
MOST_PER_1000 = 1.0
# What comes once, whenever that is: an arena of the allocator, a connection, a thread of a pool. In the middle of the
# second half it lifts the fitted line by one and a half times its size, which weighs the more the shorter the run.
STEP = {"private": 1.0, "resident": 1.0, "files": 4.0, "threads": 2.0}
STEP_LIFTS = 1.5
SCRIPTS = ("dashboard.py", "log_monitor.py", "monitor.py")  # Ray's


@dataclass(frozen=True)
class Sample:
    """One look at a process. Memory in MiB."""

    requests: int  # that had ended
    private: float
    resident: float
    files: int
    threads: int


@dataclass(frozen=True)
class Slope:
    """How one of ``STEP`` went: over the second half of the run, by 1,000 requests."""

    first: float  # of the run
    half: float
    last: float
    per_1000: float


def slope_per_1000(requests: Sequence[float], values: Sequence[float]) -> float:
    """Least squares. 0 where nothing was served between the samples."""
    mean_x, mean_y = sum(requests) / len(requests), sum(values) / len(values)
    spread = sum((x - mean_x) ** 2 for x in requests)
    if spread == 0.0:
        return 0.0
    return 1000.0 * sum((x - mean_x) * (y - mean_y) for x, y in zip(requests, values, strict=True)) / spread


def trends(samples: Sequence[Sample], turns: int) -> dict[str, Slope] | None:
    """The slope of each of ``STEP``; None for a process that was not there for the second half of ``turns`` requests.

    The first half fills what may be filled: pools, caches, arenas, the latest requests' traces.
    """
    late = [sample for sample in samples if sample.requests >= turns / 2]
    if len(late) < FEWEST_SAMPLES or late[0].requests > 0.6 * turns or late[-1].requests < 0.9 * turns:
        return None
    at = [float(sample.requests) for sample in late]
    return {
        name: Slope(
            getattr(samples[0], name),
            getattr(late[0], name),
            getattr(late[-1], name),
            slope_per_1000(at, [getattr(sample, name) for sample in late]),
        )
        for name in STEP
    }


@dataclass
class Watch:
    """Looks at a process and all below it, and at this one, the client. ``served``: how many requests ended."""

    root: psutil.Process
    served: Callable[[], int]
    samples: dict[int, list[Sample]] = field(default_factory=dict)  # by process
    names: dict[int, str] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(EVERY_S)

    def look(self) -> None:
        """One sample of each."""
        requests = self.served()
        for process in (psutil.Process(), *self.below()):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
                self.names[process.pid] = name_of(process, self.root.pid)
                memory = process.memory_full_info()
                sample = Sample(requests, memory.uss / MIB, memory.rss / MIB, process.num_fds(), process.num_threads())
                self.samples.setdefault(process.pid, []).append(sample)

    def below(self) -> list[psutil.Process]:
        """The deployment's processes."""
        return [self.root, *self.root.children(recursive=True)]


def name_of(process: psutil.Process, router: int) -> str:
    """What a process is for, from its command line."""
    if process.pid in (os.getpid(), router):
        return "client" if process.pid == os.getpid() else "router"
    words = process.cmdline() or [process.name()]
    script = next((os.path.basename(word) for word in words if os.path.basename(word) in SCRIPTS), "")
    return f"ray {script.removesuffix('.py')}" if script else os.path.basename(words[0].split()[0])


def grown(found: Mapping[str, Mapping[str, Slope]], turns: int) -> list[str]:
    """What rises faster than it may, by process."""
    most = {name: MOST_PER_1000 + STEP_LIFTS * step / (turns / 2000) for name, step in STEP.items()}
    return [
        f"{process}: {what} {slopes[what].per_1000:+.2f} by 1,000 requests, where {limit:.2g} is the most"
        for process, slopes in found.items()
        for what, limit in most.items()
        if slopes[what].per_1000 > limit
    ]


def table(found: Mapping[str, Mapping[str, Slope]]) -> str:
    """One line per process: memory in MiB."""
    lines = [f"{'':24} {'private MiB':^31} {'resident MiB':^16} {'open files':^14} {'threads':^14}"]
    each = (
        f"{'first':>7} {'half':>7} {'last':>7} {'/1000':>7} {'last':>8} {'/1000':>7}" + f" {'last':>7} {'/1000':>6}" * 2
    )
    lines.append(f"{'process':24} {each}")
    for name, slopes in found.items():
        private, resident = slopes["private"], slopes["resident"]
        line = f"{name:24} {private.first:7.1f} {private.half:7.1f} {private.last:7.1f} {private.per_1000:+7.2f}"
        line += f" {resident.last:8.1f} {resident.per_1000:+7.2f}"
        for one in (slopes["files"], slopes["threads"]):
            line += f" {one.last:7.0f} {one.per_1000:+6.2f}"
        lines.append(line)
    return "\n".join(lines)
