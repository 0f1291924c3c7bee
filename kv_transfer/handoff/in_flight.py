"""The hand-offs that are in flight on the receiving end of one link.

A ticket is in flight from its Begin on this link until it is ready or failed. An Abort of a ticket that did not begin
here leaves the reservation alone: another prefill node may still serve it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from torch import Tensor

from kv_transfer.handoff.sink import HandoffSink
from kv_transfer.handoff.state import Handoff
from kv_transfer.layout.reshard import ReshardPlan
from paceline.errors import HandoffFailed
from paceline.v1.handoff_pb2 import Cancelled, Failed, HandoffAck, HandoffMessage, Ready

log = logging.getLogger(__name__)

CANCELLED = "cancelled"


class InFlight:
    """Changed by the receiver thread alone, but for `cancel`. Tells each end once, to the sink and to the sender, when
    no write of that ticket can happen any more."""

    def __init__(
        self,
        sink: HandoffSink,
        ack: Callable[[HandoffAck], None],
        link_id: str,
        plan: ReshardPlan | None = None,
    ) -> None:
        """plan: how the link's own pipe cuts rows; None: it does not."""
        self._sink, self._plan = sink, plan
        self._ack = ack
        self.link_id = link_id
        self._lock = threading.Lock()  # taken before a hand-off's own
        self._handoffs: dict[str, Handoff] = {}
        self._cancelled: set[str] = set()  # of those in flight; end with the sender's Abort or State

    # -- from any thread ---------------------------------------------------------------------------------------

    @property
    def tickets(self) -> tuple[str, ...]:
        """Begun here and not over."""
        with self._lock:
            return tuple(self._handoffs)

    def get(self, ticket: str) -> Handoff | None:
        """The hand-off of a ticket that is in flight here."""
        return self._handoffs.get(ticket)

    def cancel(self, ticket: str) -> bool:
        """See `HandoffReceiver.cancel`."""
        with self._lock:
            if ticket not in self._handoffs:
                return False
            self._cancelled.add(ticket)
        self.answer(HandoffAck(ticket=ticket, cancelled=Cancelled()))
        return True

    def is_cancelled(self, ticket: str) -> bool:
        """Its client left; the sender knows, or will."""
        return ticket in self._cancelled

    def answer(self, ack: HandoffAck) -> None:
        """Put an answer on the control stream."""
        try:
            self._ack(ack)
        except Exception:
            log.exception("an acknowledgement could not be posted")

    # -- from the receiver thread ------------------------------------------------------------------------------

    def begin(self, message: HandoffMessage) -> None:
        """Begin: the hand-off is in flight here from now on, or refused."""
        ticket, begin = message.ticket, message.begin
        if ticket in self._handoffs:
            self.fail(ticket, "begun twice")
            return
        handoff = self._sink.lookup(ticket)
        if handoff is None:
            self._disown(ticket, "unknown ticket")
            return
        tokens = range(begin.first_token, begin.first_token + begin.num_tokens)
        try:
            with self._lock:
                handoff.begin(tokens, self.link_id, begin.reshard, self._plan)
                handoff.count_meta(message.ByteSize())
                self._handoffs[ticket] = handoff
        except HandoffFailed as error:
            if handoff.fail_reserved(str(error)):
                self._report_failed(ticket, str(error))
            else:  # over already, or on another link: not ours to fail
                self._disown(ticket, str(error))

    def complete(self, message: HandoffMessage, hidden: Tensor) -> None:
        """State, which `Handoff.state_problem` has passed, and its hidden rows: ready, unless the client left."""
        ticket, state = message.ticket, message.state
        with self._lock:  # `cancel` comes before this, or finds the ticket ready
            cancelled, handoff = ticket in self._cancelled, self._handoffs[ticket]
            if not cancelled:
                handoff.state(state.num_hidden_rows, state.num_bytes, drafts=state.proposal_depth > 0)
                handoff.count_meta(message.ByteSize())
                del self._handoffs[ticket]
        if cancelled:
            self.fail(ticket, CANCELLED)
            return
        try:
            self._sink.ready(ticket, state, hidden)
        except Exception as error:
            handoff.fail(f"taking over failed: {error}")
            self._report_failed(ticket, f"taking over failed: {error}")
            return
        self.answer(HandoffAck(ticket=ticket, ready=Ready()))

    def fail_or_disown(self, ticket: str, reason: str) -> None:
        """The end of a ticket that may not be in flight here."""
        if ticket in self._handoffs:
            self.fail(ticket, reason)
        else:
            self._disown(ticket, "not in flight")

    def fail(self, ticket: str, reason: str) -> None:
        """FAILED, told once to sink and sender; nothing when the ticket is not in flight any more."""
        with self._lock:
            handoff = self._handoffs.pop(ticket, None)
            if handoff is None:
                return
            if ticket in self._cancelled:
                reason = CANCELLED
                self._cancelled.discard(ticket)
            if not handoff.terminal:
                handoff.fail(reason)
        self._report_failed(ticket, reason)

    def _disown(self, ticket: str, reason: str) -> None:
        """Tell the sender that a ticket is nothing to this link."""
        self.answer(HandoffAck(ticket=ticket, failed=Failed(reason=reason)))

    def _report_failed(self, ticket: str, reason: str) -> None:
        try:
            self._sink.failed(ticket, reason)
        except Exception:
            log.exception("telling a failed hand-off failed")
        self.answer(HandoffAck(ticket=ticket, failed=Failed(reason=reason)))
