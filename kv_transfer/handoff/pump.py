"""What moves the messages of a sending end, and the thread that sees them through.

A message's way, one event per edge:

    queued --announced: its descriptor is posted--> due --started: the transport has it--> started --awaited--> off

Whoever queues, gives bytes or brings credit announces and starts at once: neither waits for the thread to be done with
others. The thread awaits what was started, in that order. A message is started with no lock held, since a transport may
write there for milliseconds.

When the link dies, what is queued or due is given back at once. What was started may still be read by the transport: it
is awaited behind the abort, each message within the bounds of its transport, and given back then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kv_transfer.handoff.outbox import Outbox, Outgoing, Payload
from kv_transfer.handoff.tickets import TicketBook, tell_owner
from kv_transfer.transports.base import Pending, StillInFlight, Transport
from paceline.v1.handoff_pb2 import HandoffMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """A message in the hands of the transport, or a descriptor that announces none. ``wait``: returns when its bytes
    are off, raises when they will never be; either way nobody reads them any more, but for StillInFlight."""

    item: Outgoing
    payload: Payload | None
    began: float  # monotonic clock
    wait: Pending

    @property
    def num_bytes(self) -> int:
        """Bytes of this message."""
        return self.payload.data.nbytes if self.payload is not None else 0

    @property
    def bytes_beside(self) -> int:
        """Bytes that lanes move with it."""
        beside = None if self.payload is None else self.payload.beside
        return 0 if beside is None else beside.num_bytes


class WirePump:
    """A link's transport and its sender thread.

    ``on_broken(reason)``: the link died on the thread; told once, after every ticket that can end has been told.
    ``on_sent``: see HandoffSender. ``credit_timeout_s``: longest wait of the thread for credit.
    """

    def __init__(
        self,
        transport: Transport,
        post: Callable[[HandoffMessage], None],
        outbox: Outbox,
        book: TicketBook,
        *,
        on_broken: Callable[[str], None],
        on_sent: Callable[[HandoffMessage, float], None] | None,
        credit_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._post = post
        self._outbox = outbox
        self._book = book
        self._on_broken = on_broken
        self._on_sent = on_sent
        self._credit_timeout_s = credit_timeout_s
        self._idle: torch.cuda.Stream | None = None  # a CUDA transport waits for the caller's stream
        self._starting = threading.Lock()  # held by the one thread that starts messages; taken without waiting
        self._due: deque[tuple[Outgoing, Payload | None]] = deque()
        self._is_starting = False  # a message was taken from ``_due`` and is not in ``_started`` yet
        self._started: deque[Started] = deque()
        self._last_end = 0.0  # of the latest message
        self._broken: str | None = None  # why the thread is to end the link
        self._thread = threading.Thread(target=self._run, name="handoff-sender", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Announce what is queued, as far as credit goes, and let it leave."""
        with self._outbox.changed:
            try:
                for item in self._outbox.announce():
                    self._post(item.message)
                    self._make_due(item)
            except Exception as error:
                self._broken = self._broken or str(error) or repr(error)
            self._outbox.changed.notify_all()
        self._start_due()

    def give(self, item: Outgoing, payload: Payload) -> bool:
        """Let the next message of ``item`` leave once that is announced. False: ``item`` was dropped."""
        with self._outbox.changed:
            item.give(payload)
            wanted = not item.dropped
            if item.announced and wanted:
                self._make_due(item)
        self._start_due()
        return wanted

    def stop(self, reason: str) -> bool:
        """The link is dead: drop what is not started, abort the transport, fail every ticket and tell those of which no
        message is in the hands of the transport; the thread does so for the others. False when it was dead already."""
        with self._outbox.changed:
            if self._outbox.closed is not None:
                return False
            self._outbox.close(reason)
            for _, payload in self._due:
                if payload is not None:
                    payload.done()
            self._due.clear()
            tickets = self._book.fail_all(reason)
            self._outbox.changed.notify_all()
        self._transport.abort()
        for ticket in tickets:
            self._book.tell(ticket)
        return True

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread, behind `stop`. False when a send is still blocked."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- starting ----------------------------------------------------------------------------------------------

    def _make_due(self, item: Outgoing) -> None:
        """What was given of an announced item is to start."""
        if not item.num_bytes:
            self._due.append((item, None))
        while item.payloads:
            self._due.append((item, item.payloads.popleft()))

    def _start_due(self) -> None:
        """Start what is due, in order. A thread that finds another one at it leaves all to that one, which looks again
        when it is done: so nobody waits for a message that somebody else writes."""
        while self._due and self._starting.acquire(blocking=False):
            try:
                while (due := self._take_due()) is not None:
                    self._hand_to_thread(self._start(*due))
            finally:
                self._starting.release()

    def _take_due(self) -> tuple[Outgoing, Payload | None] | None:
        with self._outbox.changed:
            if not self._due:
                return None
            item, payload = self._due.popleft()
            self._outbox.hold(item)
            self._is_starting = True
            return item, payload

    def _start(self, item: Outgoing, payload: Payload | None) -> Started:
        """Let bytes of ``item`` leave, as far as the transport can without waiting."""
        began = time.monotonic()
        try:
            return Started(item, payload, began, self._start_payload(payload))
        except Exception as error:
            return Started(item, payload, began, _raising(error))  # to be met when its turn comes

    def _start_payload(self, payload: Payload | None) -> Pending:
        if payload is None:
            return lambda: None
        sent = self._start_data(payload)
        if payload.beside is None:
            return sent
        try:
            return _both(sent, payload.beside.start())
        except Exception as error:
            return _both(sent, _raising(error))  # what has started is awaited all the same

    def _start_data(self, payload: Payload) -> Pending:
        if payload.produced is not None:
            return self._start_from_gpu(payload.data, payload.produced)
        return self._transport.start_send(payload.data)

    def _start_from_gpu(self, data: torch.Tensor, produced: torch.cuda.Event) -> Pending:
        """Bytes that are being computed leave as soon as they are there; the time of a message counts from then on."""
        idle = self._idle = self._idle or torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(idle):
            idle.wait_event(produced)
            sent = self._transport.start_send(data)

        def wait() -> None:
            produced.synchronize()
            with torch.cuda.stream(idle):
                sent()

        return wait

    def _hand_to_thread(self, started: Started) -> None:
        with self._outbox.changed:
            self._is_starting = False
            self._started.append(started)
            self._outbox.changed.notify_all()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (started := self._next()) is not None:
            self._see_through(started)

    def _next(self) -> Started | None:
        """The next message that was started; waits for one. None: the link is dead, and none is left."""
        outbox = self._outbox
        while True:
            with outbox.changed:
                while not self._started and self._broken is None and not self._is_over:
                    if not outbox.waits_for_credit:
                        outbox.changed.wait()
                    elif not outbox.changed.wait_for(self._unstuck, self._credit_timeout_s):
                        self._broken = f"no credit from the receiver within {self._credit_timeout_s:g} s"
                broken, self._broken = self._broken, None
                if broken is None:
                    return self._started.popleft() if self._started else None
            self._break(broken)

    @property
    def _is_over(self) -> bool:
        """The link is dead, and the transport gets nothing more."""
        return self._outbox.closed is not None and not self._is_starting

    def _unstuck(self) -> bool:
        """The thread does not wait for credit (any more)."""
        over = self._outbox.closed is not None or self._broken is not None
        return over or bool(self._started) or not self._outbox.waits_for_credit

    def _see_through(self, started: Started) -> None:
        item = started.item
        began = max(started.began, self._last_end)
        if item.began is None:
            item.began = began
        try:
            started.wait()
        except StillInFlight as error:
            log.error("hand-off %s: %s; its rows and its buffer stay held", item.message.ticket, error)
            return
        except Exception as error:
            self._break(str(error) or repr(error))
            self._off(started, None)
            return
        took_s = time.monotonic() - began
        if self._on_sent is not None and item.unsent == started.num_bytes:
            tell_owner(self._on_sent, item.message, item.began)
        self._last_end = time.monotonic()
        self._off(started, took_s)

    def _off(self, started: Started, took_s: float | None) -> None:
        """The transport is done with a message; ``took_s`` None: the link broke in the midst of it."""
        item, outbox = started.item, self._outbox
        with outbox.changed:
            outbox.let_go(item)
            item.unsent -= started.num_bytes
            if not item.unsent and not item.dropped:
                outbox.sent(item)
            if took_s is not None:
                self._book.count(item, started.num_bytes + started.bytes_beside, took_s)
            if started.payload is not None:
                started.payload.done()
            outbox.changed.notify_all()
        self._book.tell(item.message.ticket)

    def _break(self, reason: str) -> None:
        if self.stop(reason):
            self._on_broken(reason)


def _raising(error: Exception) -> Pending:
    def wait() -> None:
        raise error

    return wait


def _both(first: Pending, second: Pending) -> Pending:
    """Waits for both, whatever becomes of the first."""

    def wait() -> None:
        try:
            first()
        finally:
            second()

    return wait
