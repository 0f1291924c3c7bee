"""The life of one hand-off on the decode node, as a state machine without I/O.

    RESERVED --begin--> SENDING --state--> READY --release--> RELEASED
        |                 |  ^               |
        |                 |  +- chunk        |
        +- fail_reserved -+------fail--------+--> FAILED

| edge                 | event           | owner                                                        |
|----------------------|-----------------|--------------------------------------------------------------|
| (made) -> RESERVED   |                 | decode node: pages are reserved, the ticket is issued        |
| RESERVED -> SENDING  | `begin`         | receiver thread of the link that brings Begin                |
| SENDING -> SENDING   | `chunk`         | that thread, when the bytes of a chunk have arrived          |
| SENDING -> READY     | `state`         | that thread, on State; only when every row has arrived       |
| READY -> RELEASED    | `release`       | decode node: the sequence ended and its pages went back      |
| RESERVED -> FAILED   | `fail_reserved` | decode node: the client left, or the reserve deadline passed |
| SENDING -> FAILED    | `fail`          | that thread: refused event, Abort, lost link, or when asked  |
| READY -> FAILED      | `fail`          | decode node                                                  |

It fails closed: a refused `chunk`, `state` or `release` in RESERVED or SENDING ends in FAILED. A refused `begin`
changes nothing (another link may be writing; the receiver then tries `fail_reserved`), nor does any event that is
refused later. Each event is atomic: of a `begin` and a `fail_reserved` that race, one wins. Every state that is entered
is an event of the hand-off's ``trace``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV, ByteClass, RowBlock
from kv_transfer.handoff.coverage import Coverage, ExpectedRows
from kv_transfer.layout.reshard import ReshardPlan
from paceline.errors import HandoffFailed
from paceline.tracing import NO_TRACE, Trace


class HandoffState(StrEnum):
    """Where a hand-off stands."""

    RESERVED = "reserved"
    SENDING = "sending"
    READY = "ready"
    RELEASED = "released"
    FAILED = "failed"


class Handoff:
    """One hand-off; made when the pages are reserved. ``clock`` answers seconds on a monotonic clock."""

    def __init__(
        self,
        ticket: str,
        clock: Callable[[], float],
        expected: ExpectedRows,
        *,
        reserve_deadline_s: float,
        handoff_deadline_s: float,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.ticket = ticket
        self.expected = expected
        self.status = HandoffState.RESERVED
        self.failure: str | None = None
        self.link_id = ""  # of the link that began it
        self.bytes_by_class: dict[ByteClass, int] = dict.fromkeys((TARGET_KV, DRAFT_KV, HIDDEN, META), 0)
        self.entered_at: dict[HandoffState, float] = {HandoffState.RESERVED: clock()}
        self.trace = trace
        self._lock = threading.RLock()
        self._clock = clock
        self._reserve_deadline_s = reserve_deadline_s
        self._handoff_deadline_s = handoff_deadline_s
        self._coverage = Coverage(expected)
        tokens = expected.tokens
        trace.record("hand-off reserved", first_token=tokens.start, num_tokens=len(tokens))

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def terminal(self) -> bool:
        """Nothing more can happen to it."""
        return self.status in (HandoffState.RELEASED, HandoffState.FAILED)

    @property
    def draft_complete(self) -> bool:
        """Every draft row arrived (False when the layout has no draft layer)."""
        return self._coverage.draft_complete

    @property
    def hidden_complete(self) -> bool:
        """A hidden row arrived for every token (False when none may come)."""
        return self._coverage.hidden_complete

    def expired(self, now: float) -> str | None:
        """Why the hand-off is overdue at ``now``, or None. RESERVED counts from the reservation, SENDING from Begin."""
        state = self.status
        if state is HandoffState.RESERVED:
            limit, what = self._reserve_deadline_s, "no transfer began after the reservation"
        elif state is HandoffState.SENDING:
            limit, what = self._handoff_deadline_s, "the transfer did not finish after it began"
        else:
            return None
        return f"{what} within {limit:g} s" if now - self.entered_at[state] > limit else None

    def chunk_problem(self, block: RowBlock, num_bytes: int) -> str | None:
        """Why these rows cannot be accepted now, or None. Changes nothing."""
        if self.status is not HandoffState.SENDING:
            return f"chunk while {self.status}"
        return self._coverage.problem(block, num_bytes)

    def state_problem(self, num_hidden_rows: int, num_bytes: int, *, drafts: bool = True) -> str | None:
        """Why the hand-off cannot become READY with such a State, or None. ``drafts``: it brings a draft. Changes
        nothing."""
        if self.status is not HandoffState.SENDING:
            return f"state while {self.status}"
        expected = self.expected
        if num_hidden_rows > max(1, expected.tokens.stop):
            return f"{num_hidden_rows} hidden rows for {len(expected.tokens)} tokens"
        due = num_hidden_rows * expected.hidden_size * expected.layout.hidden_dtype.itemsize
        if num_bytes != due:
            return f"{num_bytes} bytes of hidden rows declared where {due} are due"
        return self._coverage.missing(drafts=drafts)

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self, tokens: range, link_id: str = "", reshard: str = "", plan: ReshardPlan | None = None) -> None:
        """RESERVED -> SENDING on link ``link_id``; the announced tokens must be the ones that were reserved, and the
        announced plan that of the link, which cuts the rows of its own pipe. HandoffFailed if refused, and nothing
        happens. plan: None when every row crosses whole."""
        reserved, name = self.expected.tokens, "" if plan is None else plan.name
        with self._lock:
            if self.status is not HandoffState.RESERVED:
                raise HandoffFailed(f"hand-off {self.ticket}: begin while {self.status}")
            if (tokens.start, tokens.stop) != (reserved.start, reserved.stop):
                raise HandoffFailed(
                    f"hand-off {self.ticket}: rows {tokens.start}..{tokens.stop} announced where "
                    f"{reserved.start}..{reserved.stop} are reserved"
                )
            if reshard != name:
                raise HandoffFailed(
                    f"hand-off {self.ticket}: cut by plan {reshard or 'unsharded'} where {name or 'unsharded'} "
                    "is that of the link"
                )
            if plan is not None:
                self.expected = replace(self.expected, layout=plan.wire)
                self._coverage = Coverage(self.expected)
            self.link_id = link_id
            self._enter(HandoffState.SENDING)

    def chunk(self, block: RowBlock, num_bytes: int, beside: int = 0) -> None:
        """These rows, ``num_bytes`` in all, arrived. HandoffFailed if refused (wrong size, out of range, or a row that
        was there already). beside: bytes that came over lanes with them."""
        with self._lock:
            self._refuse_if(self.chunk_problem(block, num_bytes))
            self._coverage.add(block)
            self.bytes_by_class[block.byte_class] += num_bytes + beside

    def state(self, num_hidden_rows: int, num_bytes: int, *, drafts: bool = True) -> None:
        """SENDING -> READY. HandoffFailed if a row is missing or the hidden rows have a wrong size."""
        with self._lock:
            self._refuse_if(self.state_problem(num_hidden_rows, num_bytes, drafts=drafts))
            self.bytes_by_class[HIDDEN] += num_bytes
            self._enter(HandoffState.READY)

    def release(self) -> None:
        """READY -> RELEASED: nobody holds its pages any more."""
        with self._lock:
            self._refuse_if(None if self.status is HandoffState.READY else f"release while {self.status}")
            self._enter(HandoffState.RELEASED)

    def fail(self, reason: str) -> None:
        """-> FAILED. HandoffFailed when it was terminal already. Only for the owner of the present state."""
        with self._lock:
            if self.terminal:
                raise HandoffFailed(f"hand-off {self.ticket}: fail ({reason}) while {self.status}")
            self.failure = reason
            self._enter(HandoffState.FAILED)

    def fail_reserved(self, reason: str) -> bool:
        """RESERVED -> FAILED. True when it was RESERVED: no link has touched its pages, none will, they may go now.
        False, and nothing happens, when a link has begun (ask that link) or it is over."""
        with self._lock:
            if self.status is not HandoffState.RESERVED:
                return False
            self.fail(reason)
            return True

    def count_meta(self, num_bytes: int) -> None:
        """Count a control message of this hand-off."""
        self.bytes_by_class[META] += num_bytes

    # -- insides -----------------------------------------------------------------------------------------------

    def _enter(self, state: HandoffState) -> None:
        self.status = state
        self.entered_at[state] = self._clock()
        self.trace.record(f"hand-off {state}", reason=self.failure or "")

    def _refuse_if(self, problem: str | None) -> None:
        if problem is None:
            return
        if self.status in (HandoffState.RESERVED, HandoffState.SENDING):
            self.fail(problem)
        raise HandoffFailed(f"hand-off {self.ticket}: {problem}")
