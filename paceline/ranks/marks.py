"""What a GPU has not done yet of the collectives that were queued on it, and since when."""

from __future__ import annotations

import threading
import time
from collections import deque

import torch

from paceline.errors import NodeUnavailable

POLL_S = 1e-4


class Marks:
    """Marks of one device, oldest first. A mark goes when it is looked at and has happened; there are never more than
    the device has launches that wait. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: deque[tuple[torch.cuda.Event, float]] = deque()
        self._lock = threading.Lock()

    def put(self) -> None:
        """Mark what the caller's current stream holds now. The host does not wait."""
        event = self._record()
        with self._lock:
            self._waiting.append((event, time.monotonic()))
            self._forget()

    def oldest_s(self) -> float:
        """Seconds since the oldest mark that has not happened; 0 where there is none."""
        with self._lock:
            self._forget()
            return time.monotonic() - self._waiting[0][1] if self._waiting else 0.0

    def wait(self, timeout_s: float) -> None:
        """Until what the caller's current stream holds is done. It polls: a kernel that waits for a rank that is gone
        ends only by an abort. Raises NodeUnavailable past the deadline."""
        event, deadline = self._record(), time.monotonic() + timeout_s
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise NodeUnavailable(f"a part of the other ranks did not come within {timeout_s:g} s")
            time.sleep(POLL_S)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _forget(self) -> None:
        while self._waiting and self._waiting[0][0].query():  # type: ignore[no-untyped-call]
            self._waiting.popleft()
