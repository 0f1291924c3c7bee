"""A transport pair inside one process, for tests and for prefill and decode in one process."""

from __future__ import annotations

import threading
import time
from collections import deque

from torch import Tensor

from kv_transfer.transports.base import Transport, TransportError
from kv_transfer.transports.side_stream import finish_queued


class _Pipe:
    """A bounded queue of messages. Filled by the sending end, emptied by the receiving end."""

    def __init__(self, max_messages: int, timeout_s: float) -> None:
        self.max_messages = max_messages
        self.timeout_s = timeout_s
        self.messages: deque[Tensor] = deque()
        self.cond = threading.Condition()
        self.dead: str | None = None  # set once: nothing more goes in
        self.aborted = False  # nothing more comes out either

    def end(self, reason: str, *, abort: bool) -> None:
        with self.cond:
            self.dead = self.dead or reason
            if abort:
                self.aborted = True
                self.messages.clear()
            self.cond.notify_all()

    def wait_until_locked(self, full: bool) -> None:
        """Wait while the queue is full (or, with ``full`` False, empty). TransportError when dead or too late."""
        deadline = time.monotonic() + self.timeout_s
        while (len(self.messages) >= self.max_messages) if full else not self.messages:
            if self.dead is not None:
                raise TransportError(self.dead)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self.end("message timeout on the loopback transport", abort=True)
                continue
            self.cond.wait(remaining)
        if self.dead is not None and (full or self.aborted):
            raise TransportError(self.dead)


class LoopbackTransport(Transport):
    """One end of a pipe; made by `loopback_pair`."""

    def __init__(self, pipe: _Pipe, end: str) -> None:
        self._pipe = pipe
        self._end = end

    def _send_message(self, data: Tensor) -> None:
        """A copy goes in, and is there before the other end sees it: that one has a stream of its own on a GPU."""
        with self._pipe.cond:
            self._pipe.wait_until_locked(full=True)
            message = data.clone()
            finish_queued(data.device)
            self._pipe.messages.append(message)
            self._pipe.cond.notify_all()

    def _recv_message(self, data: Tensor) -> None:
        with self._pipe.cond:
            self._pipe.wait_until_locked(full=False)
            message = self._pipe.messages.popleft()
            self._pipe.cond.notify_all()
        if message.numel() != data.numel():
            self.abort()
            raise TransportError(f"{message.numel()} bytes arrived where {data.numel()} were expected")
        data.copy_(message)
        finish_queued(data.device)  # the copy's memory goes back to the sending end's stream

    def close(self) -> None:
        """What was sent can still be received after the sending end closed."""
        self._pipe.end(f"the {self._end} end closed the loopback transport", abort=False)

    def abort(self) -> None:
        self._pipe.end(f"the {self._end} end aborted the loopback transport", abort=True)


def loopback_pair(max_messages: int = 16, timeout_s: float = 5.0) -> tuple[LoopbackTransport, LoopbackTransport]:
    """Returns the sending and the receiving end. At most ``max_messages`` messages wait in between; each send or
    receive waits at most ``timeout_s``."""
    pipe = _Pipe(max_messages, timeout_s)
    return LoopbackTransport(pipe, "sending"), LoopbackTransport(pipe, "receiving")
