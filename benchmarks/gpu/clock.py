"""Time on a device: whole calls by the host's clock, kernels by the profiler, and the two ceilings of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from benchmarks.gpu.floors import Ceilings

WARM_UP = 3
MIN_REPEATS, MAX_REPEATS = 5, 50
LIMIT_S = 4.0  # of one sample
JOIN_S = 5e-6  # gaps between kernels that are the device's own: launches inside a graph, queued launches
COPY_BYTES, MATMUL_SIZE = 4 << 30, 8192  # on a GPU
SMALL_COPY_BYTES, SMALL_MATMUL_SIZE = 16 << 20, 256  # elsewhere: for tests


@dataclass(frozen=True)
class Sample:
    """Seconds of repeated calls."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median if self.median else 0.0


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device, limit_s: float = LIMIT_S) -> None:
        self.device, self.limit_s = device, limit_s
        self.on_gpu = device.type == "cuda"

    def sync(self) -> float:
        """The device's work until here is done; seconds on the host's clock."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def wall(self, work: Callable[[], object], warm_up: int = WARM_UP, repeats: int = MAX_REPEATS) -> Sample:
        """Whole calls, one at a time, each waited for: what a caller waits. At least MIN_REPEATS of them, and not
        many more seconds than ``limit_s``."""
        for _ in range(warm_up):
            work()
        times: list[float] = []
        end = self.sync() + self.limit_s
        while len(times) < min(MIN_REPEATS, repeats) or (len(times) < repeats and time.perf_counter() < end):
            began = self.sync()
            work()
            times.append(self.sync() - began)
        return Sample(tuple(times))

    def events(self, work: Callable[[], object], warm_up: int = WARM_UP, repeats: int = MIN_REPEATS) -> Sample:
        """The device's own time from the first to the last kernel of each call; the host's where there is none."""
        if not self.on_gpu:
            return self.wall(work, warm_up, repeats)
        for _ in range(warm_up):
            work()
        pairs = []
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            work()
            last.record()
            pairs.append((first, last))
        self.sync()
        return Sample(tuple(first.elapsed_time(last) / 1e3 for first, last in pairs))

    def busy(self, work: Callable[[], object], calls: int = 5) -> float | None:
        """Seconds of a call in which the device worked, gaps of at most JOIN_S counted in; None where the profiler
        sees no kernel (a CPU, or a machine that forbids it)."""
        if not self.on_gpu:
            return None

        def repeated() -> None:
            for _ in range(calls):
                work()

        found = kernel_intervals(repeated, self.sync)
        return joined(found, JOIN_S) / calls if found else None


def kernel_intervals(work: Callable[[], object], sync: Callable[[], object]) -> list[tuple[float, float]]:
    """Start and end in seconds of every kernel and copy that ``work`` ran."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            sync()
        events = profiler.events() or []
    except (RuntimeError, AssertionError):  # tracing is taken or forbidden, or this build of torch has none
        return []
    return [(e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events if e.device_type == DeviceType.CUDA]


def joined(intervals: Iterable[tuple[float, float]], gap_s: float) -> float:
    """Seconds covered by ``intervals``, overlaps once, gaps of at most ``gap_s`` filled."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        if start > end + gap_s:
            total, end = total + stop - start, stop
        elif stop > end:
            total, end = total + stop - end, stop
    return total


def measure_ceilings(clock: Clock, dtype: torch.dtype) -> Ceilings:
    """Copy bandwidth (bytes read and written) and matrix rate, over random data: zeros run faster."""
    return Ceilings(_copy_rate(clock), _matmul_rate(clock, dtype))


def _copy_rate(clock: Clock) -> float:
    size = COPY_BYTES if clock.on_gpu else SMALL_COPY_BYTES
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=clock.device)
    dest = torch.empty_like(source)
    return 2.0 * size / clock.events(lambda: dest.copy_(source), repeats=10).median


def _matmul_rate(clock: Clock, dtype: torch.dtype) -> float:
    n = MATMUL_SIZE if clock.on_gpu else SMALL_MATMUL_SIZE
    a, b = (torch.randn(n, n, device=clock.device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * n**3 / clock.events(lambda: torch.mm(a, b, out=out), repeats=10).median
