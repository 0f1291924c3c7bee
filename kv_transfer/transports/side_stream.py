"""Copies off a GPU beside its computation; on a CPU the copying thread is all there is, and nothing to wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """A stream of a device's own for copies, of the lowest priority: kernels of the model go first.

    On a CPU every method does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """The work that the caller's current stream holds now."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work queued inside runs on this stream, once ``mark`` has happened; the caller's thread does not wait."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield
