"""Medians, bandwidth and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.common.console import step
from paceline.layers.build import load_kernels

REPEATS = 5


def median_s(work: Callable[[], object], repeats: int = REPEATS, what: str = "") -> float:
    """Median wall seconds of ``work`` after one warm-up. what: is told on stderr before each run, where it is given."""
    times = []
    for number in range(repeats + 1):
        if what:
            step(number, repeats + 1, what)
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def read_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes per second that plain vector loads reach over memory far larger than a cache, best of 5."""
    library = load_kernels()
    buffer = torch.zeros(num_bytes // 4).fill_(1.0)
    best = 0.0
    for _ in range(REPEATS):
        began = time.perf_counter()
        if library is None:
            buffer.sum()
        else:
            library.pl_read(buffer.data_ptr(), buffer.numel())
        best = max(best, num_bytes / (time.perf_counter() - began))
    return best
