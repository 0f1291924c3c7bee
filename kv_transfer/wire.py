"""Messages on their way through a transport, started one after the other and awaited in that order."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kv_transfer.outbox import Outgoing
from kv_transfer.transport import Pending, Transport


@dataclass(frozen=True)
class Started:
    """A message on the wire. ``wait``: returns when its bytes are off, raises when they will never be."""

    item: Outgoing
    began: float  # monotonic clock
    wait: Pending


class Wire:
    """A link's transport as its sender thread uses it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._idle: torch.cuda.Stream | None = None  # a CUDA transport waits for the caller's stream: for nothing

    def start(self, item: Outgoing) -> Started:
        """Let the bytes of ``item`` leave, as far as the transport can without waiting."""
        began = time.monotonic()
        try:
            return Started(item, began, self._start(item))
        except Exception as error:
            return Started(item, began, _raising(error))  # to be met when its turn comes

    def _start(self, item: Outgoing) -> Pending:
        if item.data is None:
            return lambda: None
        if item.produced is not None:
            return lambda: self._send_from_gpu(item)
        return self._transport.start_send(item.data)

    def _send_from_gpu(self, item: Outgoing) -> None:
        assert item.data is not None
        assert item.produced is not None
        if self._idle is None:
            self._idle = torch.cuda.Stream(item.data.device)  # type: ignore[no-untyped-call]
        item.produced.synchronize()
        with torch.cuda.stream(self._idle):
            self._transport.send(item.data)


def _raising(error: Exception) -> Pending:
    def wait() -> None:
        raise error

    return wait
