"""Copies off a GPU and onto it, beside its computation.

On a CPU the copying thread is all there is, and nothing to wait for: everything here does nothing there.
"""

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
        """See `held_work`."""
        return None if self._stream is None else held_work(self._stream.device)

    @contextmanager
    def after(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Work queued inside runs on this stream, once ``mark`` has happened; the caller's thread does not wait."""
        if self._stream is None or mark is None:
            yield
            return
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield

    def reads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say of another stream's memory that this stream reads it: it is not given to anyone else before. Returns
        ``tensor``."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor


def held_work(device: torch.device) -> torch.cuda.Event | None:
    """A mark behind the work that the caller's current stream of ``device`` holds now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What the thread queues inside does not wait for what other threads queue, a model's steps above all."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield


def go_on_after(mark: torch.cuda.Event | None, device: torch.device) -> None:
    """Work that the caller queues from now on runs once ``mark`` has happened; the caller does not wait."""
    if mark is not None:
        torch.cuda.current_stream(device).wait_event(mark)


def finish_queued(device: torch.device) -> None:
    """Wait until what the caller's current stream holds is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def read_by_the_model(tensor: torch.Tensor) -> torch.Tensor:
    """Say of memory that this thread's stream allocated that the model's stream uses it too: it is not given to anyone
    else while that stream still has work with it. Returns ``tensor``."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor
