"""The decode side of a link: one thread that takes descriptors in order and receives the bytes each announces.

Queue: produced by the control stream (`feed`), consumed in order by the receiver thread. Bytes are received into a
staging buffer, then given to the sink; bytes of a ticket that is unknown, failed or cancelled are received too and
thrown away, so that the stream stays in step. As bytes leave the staging buffer, whatever became of them, the sender
gets credit for as many more. Requests about a ticket (`cancel`, `fail`) go to the same thread, so
`HandoffSink.ready` and `failed` are told only when no write of that ticket can happen any more.

When the link dies, the tickets in flight fail only after the blocked receive has returned; until then they are listed
in ``draining`` and their pages must not be used again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor

from kv_transfer.handoff.block import RowBlock, described
from kv_transfer.handoff.checksum import checksum_problem
from kv_transfer.handoff.cut import message_sizes, messages
from kv_transfer.handoff.staging import NUM_BUFFERS, Staging
from kv_transfer.handoff.state import Handoff
from kv_transfer.transports.base import Transport, TransportError
from paceline.errors import HandoffFailed, Overloaded
from paceline.v1.handoff_pb2 import Cancelled, Chunk, Credit, Failed, HandoffAck, HandoffMessage, Ready, State

log = logging.getLogger(__name__)

MAX_QUEUED_MESSAGES = 4096
CANCELLED = "cancelled"


class HandoffSink(Protocol):
    """Where a link's hand-offs land: the decode node. Called on the receiver thread; no method may block for long."""

    def lookup(self, ticket: str) -> Handoff | None:
        """The hand-off of a ticket, or None when it was never issued or is forgotten."""

    def write_kv(self, ticket: str, block: RowBlock, data: Tensor) -> None:
        """Scatter rows into the pages of the ticket; hidden rows are kept. ``data``: flat, of the plan's layout and
        dtype, in canonical order (layer, token, head); valid during the call only. An exception fails this ticket
        alone."""

    def ready(self, ticket: str, state: State, hidden: Tensor) -> None:
        """All rows are written. ``hidden``: [num_hidden_rows, hidden_size], the layout's dtype, the sink's to keep."""

    def failed(self, ticket: str, reason: str) -> None:
        """The hand-off is FAILED and will not be written to any more."""


class HandoffReceiver:
    """One link's receiver.

    A ticket is *in flight* here from its Begin on this link until it is ready or failed. Before that the decode node
    gives it up itself (`Handoff.fail_reserved`); in between it asks this link (`cancel`, `fail`). An Abort of a ticket
    that did not begin here leaves the reservation alone: another prefill node may still serve it.

    ``ack``: puts an answer on the control stream; thread-safe, never blocks.
    ``on_link_lost(reason)``: once, when the link dies and its tickets have failed (not on ``close``).
    ``max_chunk_bytes``: a larger chunk fails its ticket; bounds the staging buffer.
    ``device``: where bytes are received (a CUDA device for NCCL).
    ``checksums``: bytes whose sum is missing or wrong fail their ticket before any of them is used; host memory only.
    """

    def __init__(
        self,
        transport: Transport,
        sink: HandoffSink,
        ack: Callable[[HandoffAck], None],
        *,
        link_id: str = "",
        on_link_lost: Callable[[str], None] = lambda reason: None,
        max_chunk_bytes: int = 256 * 1024 * 1024,
        device: torch.device | str = "cpu",
        checksums: bool = False,
    ) -> None:
        self.link_id = link_id
        self._transport = transport
        self._sink = sink
        self._ack = ack
        self._on_link_lost = on_link_lost
        self._max_chunk_bytes = max_chunk_bytes
        self._checksums = checksums
        self._staging = Staging(transport, device)
        self._cond = threading.Condition()
        self._queue: deque[HandoffMessage] = deque()
        self._to_fail: deque[tuple[str, str]] = deque()  # at most one or two a ticket in flight
        self._in_flight: dict[str, Handoff] = {}  # begun over this link, not terminal
        self._cancelled: set[str] = set()  # of those in flight; end with the sender's Abort or State
        self._dead: str | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="handoff-receiver", daemon=True)
        self._thread.start()

    # -- the owner's events ------------------------------------------------------------------------------------

    def feed(self, message: HandoffMessage) -> None:
        """Queue the next control message; never blocks. TransportError when the link is dead. Overloaded when 4096
        messages wait: the sender ran ahead of the bytes it announced, so end the link."""
        with self._cond:
            if self._dead is not None:
                raise TransportError(f"link is dead: {self._dead}")
            if len(self._queue) >= MAX_QUEUED_MESSAGES:
                raise Overloaded(f"{MAX_QUEUED_MESSAGES} control messages wait on one link")
            self._queue.append(message)
            self._cond.notify_all()

    def cancel(self, ticket: str) -> bool:
        """The client left: tell the sender; `HandoffSink.failed` follows when its Abort or State has arrived, or when
        the link dies, or after `fail`. False when the ticket is not in flight on this link: then nothing follows."""
        with self._cond:
            if ticket not in self._in_flight:
                return False
            self._cancelled.add(ticket)
        self._answer(HandoffAck(ticket=ticket, cancelled=Cancelled()))
        return True

    def fail(self, ticket: str, reason: str) -> bool:
        """Give a ticket up now (a deadline passed). `HandoffSink.failed` follows, at the latest one message timeout
        later. False when the ticket is not in flight on this link: then nothing follows."""
        with self._cond:
            if ticket not in self._in_flight:
                return False
            if self._dead is None:
                self._to_fail.append((ticket, reason))
                self._cond.notify_all()
            return True

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def draining(self) -> tuple[str, ...]:
        """Tickets of a dead link whose pages may still be written: a receive is blocked. Empty on a live link."""
        with self._cond:
            return tuple(self._in_flight) if self._dead is not None else ()

    @property
    def alive(self) -> bool:
        """The link can still be used."""
        return self._dead is None

    # -- end of the link ---------------------------------------------------------------------------------------

    def link_lost(self, reason: str) -> None:
        """The peer is gone (sentinel, control stream, lease). Tickets in flight fail once no receive is blocked."""
        with self._cond:
            if self._dead is not None:
                return
            self._dead = reason
            self._queue.clear()
            self._cond.notify_all()
        self._transport.abort()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop, and close the transport; tickets in flight fail. True when the thread ended within ``timeout_s``; False
        when a receive is still blocked (its tickets stay in ``draining`` until it returns)."""
        self._closing = True
        self.link_lost("link closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        self._transport.close()
        return not self._thread.is_alive()

    # -- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, tuple):
                self._fail_ticket(*work)
                continue
            try:
                self._handle(work)
            except Exception as error:
                if not isinstance(error, TransportError):
                    log.exception("hand-off receiver failed")
                self.link_lost(str(error) or repr(error))
        self._end()

    def _next(self) -> HandoffMessage | tuple[str, str] | None:
        with self._cond:
            while not (self._queue or self._to_fail) and self._dead is None:
                self._cond.wait()
            if self._to_fail:
                return self._to_fail.popleft()
            return self._queue.popleft() if self._dead is None else None

    def _end(self) -> None:
        """No receive is blocked any more: fail what was in flight."""
        reason = self._dead or "link closed"
        for ticket in tuple(self._in_flight):
            self._fail_ticket(ticket, reason)
        if self._closing:
            return
        try:
            self._on_link_lost(reason)
        except Exception:
            log.exception("telling a lost link failed")

    def _handle(self, message: HandoffMessage) -> None:
        """One control message and the bytes that it announces. TransportError when the link broke."""
        match message.WhichOneof("body"):
            case "hello":
                self._answer(HandoffAck(hello=Ready()))
            case "begin":
                self._on_begin(message)
            case "chunk":
                self._on_chunk(message, message.chunk)
            case "state":
                self._on_state(message, message.state)
            case "abort":
                self._fail_or_disown(message.ticket, message.abort.reason or "aborted by the sender")
            case other:
                raise TransportError(f"control message without a known body ({other})")
        self._give_credit()

    def _on_begin(self, message: HandoffMessage) -> None:
        ticket = message.ticket
        if ticket in self._in_flight:
            self._fail_ticket(ticket, "begun twice")
            return
        handoff = self._sink.lookup(ticket)
        if handoff is None:
            self._disown(ticket, "unknown ticket")
            return
        try:
            with self._cond:
                begin = message.begin
                tokens = range(begin.first_token, begin.first_token + begin.num_tokens)
                handoff.begin(tokens, self.link_id, begin.reshard)
                handoff.count_meta(message.ByteSize())
                self._in_flight[ticket] = handoff
        except HandoffFailed as error:
            if handoff.fail_reserved(str(error)):
                self._report_failed(ticket, str(error))
            else:  # over already, or on another link: not ours to fail
                self._disown(ticket, str(error))

    def _on_chunk(self, message: HandoffMessage, chunk: Chunk) -> None:
        handoff = self._in_flight.get(message.ticket)
        if handoff is None or message.ticket in self._cancelled:
            self._staging.drain(message_sizes(message))
            return
        block = RowBlock.of(chunk)
        problem = handoff.chunk_problem(block, chunk.num_bytes)
        if problem is None and chunk.num_bytes > self._max_chunk_bytes:
            problem = f"a chunk of {chunk.num_bytes} bytes; at most {self._max_chunk_bytes} are taken"
        if problem is None and self._checksums and len(message_sizes(message)) > 1:
            problem = "a checksum over several messages, whose rows are used as they come"
        if problem is not None:
            self._staging.drain(message_sizes(message))
            self._fail_ticket(message.ticket, problem)
            return
        self._take_rows(message, block, handoff)

    def _take_rows(self, message: HandoffMessage, block: RowBlock, handoff: Handoff) -> None:
        """The rows of a chunk that `Handoff.chunk_problem` has passed, message by message. Those behind one that ends
        the ticket are received and thrown away."""
        parts, num_bytes = messages(block, message.chunk.num_bytes), message.chunk.num_bytes
        sizes = message_sizes(message)
        began = time.monotonic()
        for i, (part, size) in enumerate(parts):
            data = self._staging.receive(size).view(handoff.expected.layout.dtype)
            self._staging.expect(chain(sizes[i + 1 :], self._announced_sizes()))
            if self._is_corrupt(message, data):
                return
            try:
                if i == 0:
                    handoff.chunk(block, num_bytes)
                    handoff.count_meta(message.ByteSize())
                self._sink.write_kv(message.ticket, part, data)
            except Exception as error:
                self._fail_ticket(message.ticket, f"writing rows failed: {error}")
            self._give_credit()
            self._fail_late()
            if message.ticket not in self._in_flight:
                self._staging.drain(sizes[i + 1 :])
                return
        handoff.trace.record("chunk received", began, time.monotonic(), **described(message))

    def _is_corrupt(self, message: HandoffMessage, data: Tensor) -> bool:
        """Fail the ticket of bytes whose checksum is asked for and does not hold."""
        problem = checksum_problem(message, data) if self._checksums else None
        if problem is not None:
            log.error("link %s, hand-off %s: %s", self.link_id, message.ticket, problem)
            self._fail_ticket(message.ticket, problem)
        return problem is not None

    def _announced_sizes(self) -> list[int]:
        """Of the next messages with bytes: they follow, whatever becomes of their tickets."""
        with self._cond:
            announced = list(islice(self._queue, NUM_BUFFERS))
        return [size for message in announced for size in message_sizes(message)]

    def _give_credit(self) -> None:
        if (num_bytes := self._staging.credit()) > 0:
            self._answer(HandoffAck(credit=Credit(num_bytes=num_bytes)))

    def _fail_late(self) -> None:
        """Tickets whose deadline passed meanwhile."""
        while True:
            with self._cond:
                if not self._to_fail:
                    return
                late = self._to_fail.popleft()
            self._fail_ticket(*late)

    def _on_state(self, message: HandoffMessage, state: State) -> None:
        ticket = message.ticket
        handoff = self._in_flight.get(ticket)
        problem: str | None = "not in flight"
        drafts = state.proposal_depth > 0
        if handoff is not None:
            problem = handoff.state_problem(state.num_hidden_rows, state.num_bytes, drafts=drafts)
        if handoff is None or problem is not None:
            self._staging.drain(message_sizes(message))
            self._fail_or_disown(ticket, problem or "")
            return
        began, expected = time.monotonic(), handoff.expected
        hidden = self._staging.receive_new(state.num_hidden_rows, expected.hidden_size, expected.layout.dtype)
        if self._is_corrupt(message, hidden):
            return
        handoff.trace.record("state received", began, time.monotonic(), **described(message))
        with self._cond:  # `cancel` comes before this, or finds the ticket ready
            cancelled = ticket in self._cancelled
            if not cancelled:
                handoff.state(state.num_hidden_rows, state.num_bytes, drafts=drafts)
                handoff.count_meta(message.ByteSize())
                del self._in_flight[ticket]
        if cancelled:
            self._fail_ticket(ticket, CANCELLED)
            return
        try:
            self._sink.ready(ticket, state, hidden)
        except Exception as error:
            handoff.fail(f"taking over failed: {error}")
            self._report_failed(ticket, f"taking over failed: {error}")
            return
        self._answer(HandoffAck(ticket=ticket, ready=Ready()))

    # -- ends of a ticket --------------------------------------------------------------------------------------

    def _fail_or_disown(self, ticket: str, reason: str) -> None:
        if ticket in self._in_flight:
            self._fail_ticket(ticket, reason)
        else:
            self._disown(ticket, "not in flight")

    def _disown(self, ticket: str, reason: str) -> None:
        """Tell the sender that a ticket is nothing to this link."""
        self._answer(HandoffAck(ticket=ticket, failed=Failed(reason=reason)))

    def _fail_ticket(self, ticket: str, reason: str) -> None:
        """FAILED, told once to sink and sender; nothing when the ticket is not in flight any more."""
        with self._cond:
            handoff = self._in_flight.pop(ticket, None)
            if handoff is None:
                return
            if ticket in self._cancelled:
                reason = CANCELLED
                self._cancelled.discard(ticket)
            if not handoff.terminal:
                handoff.fail(reason)
        self._report_failed(ticket, reason)

    def _report_failed(self, ticket: str, reason: str) -> None:
        try:
            self._sink.failed(ticket, reason)
        except Exception:
            log.exception("telling a failed hand-off failed")
        self._answer(HandoffAck(ticket=ticket, failed=Failed(reason=reason)))

    def _answer(self, ack: HandoffAck) -> None:
        try:
            self._ack(ack)
        except Exception:
            log.exception("an acknowledgement could not be posted")
