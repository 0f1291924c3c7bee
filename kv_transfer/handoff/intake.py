"""Takes in the bytes that control messages announce, on the receiver thread of a link.

Bytes are received into a staging buffer, then given to the sink; bytes of a ticket that is unknown, failed or cancelled
are received too and thrown away, so that the stream stays in step. As bytes leave the staging buffer, whatever became
of them, the sender gets credit for as many more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import chain

from torch import Tensor

from kv_transfer.handoff.block import HIDDEN, RowBlock, described
from kv_transfer.handoff.checksum import checksum_problem
from kv_transfer.handoff.control import ControlQueue
from kv_transfer.handoff.cut import message_rows, message_sizes, messages
from kv_transfer.handoff.in_flight import InFlight
from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.staging import Staging
from kv_transfer.handoff.state import Handoff
from kv_transfer.lanes.arrivals import Arrivals
from kv_transfer.transports.base import NUM_BUFFERS, TransportError
from paceline.v1.handoff_pb2 import Credit, HandoffAck, HandoffMessage

log = logging.getLogger(__name__)


class Intake:
    """``checksums``: see HandoffReceiver. ``arrivals``: what comes over lanes beside, in the same messages.
    ``on_refused``: hears of a message that ends its hand-off by what it says, or by bytes whose sum does not hold.
    TransportError from any method: the link broke."""

    def __init__(
        self,
        staging: Staging,
        sink: HandoffSink,
        control: ControlQueue,
        in_flight: InFlight,
        *,
        checksums: bool,
        arrivals: Arrivals | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._staging = staging
        self._arrivals = arrivals
        self._sink = sink
        self._control = control
        self._in_flight = in_flight
        self._checksums = checksums
        self._on_refused = on_refused

    def chunk(self, message: HandoffMessage) -> None:
        """Take the rows of a chunk, or throw them away."""
        ticket, num_bytes = message.ticket, message.chunk.num_bytes
        handoff = self._in_flight.get(ticket)
        if handoff is None or self._in_flight.is_cancelled(ticket):
            self._drain(message)
            return
        block = RowBlock.of(message.chunk)
        problem = handoff.chunk_problem(block, num_bytes)
        if problem is None and self._checksums and len(self._sizes(message)) > 1:
            problem = "a checksum over several messages, whose rows are used as they come"
        if problem is not None:
            self._on_refused()
            self._drain(message)
            self._in_flight.fail(ticket, problem)
            return
        self._take_rows(message, block, handoff)

    def state(self, message: HandoffMessage) -> None:
        """Take the hidden rows of a State, which completes its hand-off, or throw them away."""
        ticket, state = message.ticket, message.state
        handoff = self._in_flight.get(ticket)
        problem: str | None = "not in flight"
        if handoff is not None:
            drafts = state.proposal_depth > 0
            problem = handoff.state_problem(state.num_hidden_rows, state.num_bytes, drafts=drafts)
        if handoff is None or problem is not None:
            if handoff is not None:
                self._on_refused()
            self._drain(message)
            self._in_flight.fail_or_disown(ticket, problem or "")
            return
        began, expected = time.monotonic(), handoff.expected
        hidden = self._staging.receive_new(state.num_hidden_rows, expected.hidden_size, expected.layout.hidden_dtype)
        if self._is_corrupt(message, hidden):
            return
        handoff.trace.record("state received", began, time.monotonic(), **described(message))
        self._in_flight.complete(message, hidden)

    def settle(self) -> None:
        """See `Staging.settle`."""
        self._staging.settle()
        if self._arrivals is not None:
            self._arrivals.settle()

    def give_credit(self) -> None:
        """Tell the sender that it may send more, when it is worth a message."""
        if (num_bytes := self._staging.credit()) > 0:
            self._in_flight.answer(HandoffAck(credit=Credit(num_bytes=num_bytes)))

    def _take_rows(self, message: HandoffMessage, block: RowBlock, handoff: Handoff) -> None:
        """The rows of a chunk that `Handoff.chunk_problem` has passed, message by message. Those behind one that ends
        the ticket are received and thrown away."""
        ticket, parts = message.ticket, messages(block, message.chunk.num_bytes, self._staging.multiple)
        layout, began = handoff.expected.layout, time.monotonic()
        dtype = layout.hidden_dtype if block.byte_class == HIDDEN else layout.dtype
        rows = message_rows(message)
        for i, (part, num_bytes) in enumerate(parts):
            if self._arrivals is not None:
                self._arrivals.take(rows[i])
            data = self._staging.receive(num_bytes).view(dtype)
            rest = [size for _, size in parts[i + 1 :]]
            announced = self._control.announced(NUM_BUFFERS)
            self._staging.expect(chain(rest, chain.from_iterable(map(self._sizes, announced))))
            if self._arrivals is not None:
                self._arrivals.expect([*rows[i + 1 :], *chain.from_iterable(map(message_rows, announced))])
            if self._is_corrupt(message, data):
                return
            try:
                if i == 0:
                    beside = 0 if self._arrivals is None else self._arrivals.num_bytes(block.layers, len(block.tokens))
                    handoff.chunk(block, message.chunk.num_bytes, beside)
                    handoff.count_meta(message.ByteSize())
                self._sink.write_kv(ticket, part, data)
            except TransportError:
                raise
            except Exception as error:
                self._in_flight.fail(ticket, f"writing rows failed: {error}")
            self.give_credit()
            self._fail_overdue()
            if self._in_flight.get(ticket) is None:
                self._drain(message, i + 1)
                return
        handoff.trace.record("chunk received", began, time.monotonic(), **described(message))

    def _sizes(self, message: HandoffMessage) -> tuple[int, ...]:
        return message_sizes(message, self._staging.multiple)

    def _drain(self, message: HandoffMessage, first: int = 0) -> None:
        """Take in what a control message announces, from its message ``first`` on, and throw it away."""
        if self._arrivals is None or not message.HasField("chunk"):
            self._staging.drain(self._sizes(message)[first:])
            return
        for rows in message_rows(message)[first:]:
            self._arrivals.take(rows)
            self._staging.drain([rows[2]])
        self._arrivals.drop()

    def _is_corrupt(self, message: HandoffMessage, data: Tensor) -> bool:
        """Fail the ticket of bytes whose checksum is asked for and does not hold."""
        problem = checksum_problem(message, data) if self._checksums else None
        if problem is not None:
            self._on_refused()
            log.error("link %s, hand-off %s: %s", self._in_flight.link_id, message.ticket, problem)
            self._in_flight.fail(message.ticket, problem)
        return problem is not None

    def _fail_overdue(self) -> None:
        """Tickets whose deadline passed meanwhile do not wait for the end of a long chunk."""
        while (overdue := self._control.next_to_fail()) is not None:
            self._in_flight.fail(*overdue)
