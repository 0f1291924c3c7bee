"""Messages on their way through a transport, started one after the other and awaited in that order."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kv_transfer.handoff.outbox import Outgoing, Part
from kv_transfer.transports.base import Pending, Transport


@dataclass(frozen=True)
class Started:
    """A message on the wire, or a descriptor that announces none. ``wait``: returns when its bytes are off, raises when
    they will never be."""

    item: Outgoing
    part: Part | None
    began: float  # monotonic clock
    wait: Pending


class Wire:
    """A link's transport as its sender thread uses it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._idle: torch.cuda.Stream | None = None  # a CUDA transport waits for the caller's stream: for nothing

    def start(self, item: Outgoing, part: Part | None = None) -> Started:
        """Let bytes of ``item`` leave, as far as the transport can without waiting."""
        began = time.monotonic()
        try:
            return Started(item, part, began, self._start(part))
        except Exception as error:
            return Started(item, part, began, _raising(error))  # to be met when its turn comes

    def _start(self, part: Part | None) -> Pending:
        if part is None:
            return lambda: None
        if part.produced is not None:
            return lambda: self._send_from_gpu(part)
        return self._transport.start_send(part.data)

    def _send_from_gpu(self, part: Part) -> None:
        assert part.produced is not None
        if self._idle is None:
            self._idle = torch.cuda.Stream(part.data.device)  # type: ignore[no-untyped-call]
        part.produced.synchronize()
        with torch.cuda.stream(self._idle):
            self._transport.send(part.data)


def _raising(error: Exception) -> Pending:
    def wait() -> None:
        raise error

    return wait
