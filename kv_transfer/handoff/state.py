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
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import HandoffFailed
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.tracing import NO_TRACE, Trace
from paceline.v1 import handoff_pb2

if TYPE_CHECKING:
    ByteClass: TypeAlias = handoff_pb2.ByteClass.ValueType
else:
    ByteClass = int  # the type of an enum's values exists in the stubs only

TARGET_KV = handoff_pb2.BYTE_CLASS_TARGET_KV
DRAFT_KV = handoff_pb2.BYTE_CLASS_DRAFT_KV
HIDDEN = handoff_pb2.BYTE_CLASS_HIDDEN
META = handoff_pb2.BYTE_CLASS_META
_OWNER = {TARGET_KV: LayerOwner.TARGET, DRAFT_KV: LayerOwner.DRAFT}


class HandoffState(StrEnum):
    """Where a hand-off stands."""

    RESERVED = "reserved"
    SENDING = "sending"
    READY = "ready"
    RELEASED = "released"
    FAILED = "failed"


@dataclass(frozen=True)
class HandoffPlan:
    """What the decode node expects to cross for one ticket.

    ``layout``: of the rows on the wire; the pool's own, or ``ReshardPlan.wire`` where a side is sharded. A layer of
    width 0 does not cross: nothing of it is expected. ``reshard``: the name of that plan, which Begin must carry.
    ``first_token`` and ``num_tokens``: the KV rows that it reserved and lacks (``first_token`` tokens of the prefix
    it already holds). ``draft_required`` False: the draft rows may be left out, all or none of them, or any of them
    where State brings no draft (decode then starts without a drafter). ``hidden_size``: width of one hidden row of the
    State, of the layout's dtype. ``row_width``: width of the hidden row that comes with each token; 0: none may come.
    Unless every one comes, none is used: of a request that its first token ended the last ones do not exist.
    """

    layout: KvLayout
    first_token: int
    num_tokens: int
    hidden_size: int
    draft_required: bool = True
    reshard: str = ""
    row_width: int = 0


class Handoff:
    """One hand-off; made when the pages are reserved. ``clock`` answers seconds on a monotonic clock."""

    def __init__(
        self,
        ticket: str,
        clock: Callable[[], float],
        plan: HandoffPlan,
        *,
        reserve_deadline_s: float,
        handoff_deadline_s: float,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.ticket = ticket
        self.plan = plan
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
        # For each layer the rows that arrived, one bit a token (bit 0 is plan.first_token).
        self._arrived = [0] * len(plan.layout.layers)
        self._hidden_arrived = 0
        self._complete = (1 << plan.num_tokens) - 1
        trace.record("hand-off reserved", first_token=plan.first_token, num_tokens=plan.num_tokens)

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def terminal(self) -> bool:
        """Nothing more can happen to it."""
        return self.status in (HandoffState.RELEASED, HandoffState.FAILED)

    @property
    def draft_complete(self) -> bool:
        """Every draft row arrived (False when the layout has no draft layer)."""
        layers = self.plan.layout.layer_range(LayerOwner.DRAFT)
        return len(layers) > 0 and all(self._arrived[layer] == self._complete for layer in self._crossing(layers))

    @property
    def hidden_complete(self) -> bool:
        """A hidden row arrived for every token (False when none may come)."""
        return self.plan.row_width > 0 and self._hidden_arrived == self._complete

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

    def chunk_problem(
        self,
        byte_class: ByteClass,
        first_layer: int,
        num_layers: int,
        first_token: int,
        num_tokens: int,
        num_bytes: int,
    ) -> str | None:
        """Why these rows cannot be accepted now, or None. Changes nothing."""
        if self.status is not HandoffState.SENDING:
            return f"chunk while {self.status}"
        hidden = byte_class == HIDDEN and self.plan.row_width > 0
        if byte_class not in _OWNER and not hidden:
            return f"chunk of byte class {byte_class}"
        if hidden and (first_layer or num_layers):
            return f"hidden rows of layers {first_layer}..{first_layer + num_layers}"
        problem = None if hidden else self._layers_problem(byte_class, first_layer, num_layers)
        if problem is not None:
            return problem
        layers = range(first_layer, first_layer + num_layers)
        start = first_token - self.plan.first_token
        if start < 0 or num_tokens < 0 or start + num_tokens > self.plan.num_tokens:
            return f"tokens {first_token}..{first_token + num_tokens} outside the announced range"
        row_bytes = self.plan.row_width * self.plan.layout.dtype.itemsize if hidden else self._token_bytes(layers)
        expected = num_tokens * row_bytes
        if num_bytes != expected:
            return f"{num_bytes} bytes declared where the layout says {expected}"
        rows = ((1 << num_tokens) - 1) << start
        arrived = [self._hidden_arrived] if hidden else [self._arrived[layer] for layer in self._crossing(layers)]
        if any(seen & rows for seen in arrived):
            return f"rows of tokens {first_token}..{first_token + num_tokens} sent twice"
        return None

    def _layers_problem(self, byte_class: ByteClass, first_layer: int, num_layers: int) -> str | None:
        allowed = self.plan.layout.layer_range(_OWNER[byte_class])
        layers = range(first_layer, first_layer + num_layers)
        if num_layers < 1 or layers.start not in allowed or layers.stop - 1 not in allowed:
            return f"layers {layers.start}..{layers.stop} outside {allowed.start}..{allowed.stop}"
        return None

    def state_problem(self, num_hidden_rows: int, num_bytes: int, *, drafts: bool = True) -> str | None:
        """Why the hand-off cannot become READY with such a State, or None. ``drafts``: it brings a draft. Changes
        nothing."""
        if self.status is not HandoffState.SENDING:
            return f"state while {self.status}"
        plan = self.plan
        if num_hidden_rows > max(1, plan.first_token + plan.num_tokens):
            return f"{num_hidden_rows} hidden rows for {plan.num_tokens} tokens"
        expected = num_hidden_rows * plan.hidden_size * plan.layout.dtype.itemsize
        if num_bytes != expected:
            return f"{num_bytes} bytes of hidden rows declared where {expected} are due"
        return self._missing(drafts)

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self, first_token: int, num_tokens: int, link_id: str = "", reshard: str = "") -> None:
        """RESERVED -> SENDING on link ``link_id``; the announced rows, and the plan that cuts them, must be the ones
        that were reserved. HandoffFailed if refused, and nothing happens."""
        plan = self.plan
        with self._lock:
            if self.status is not HandoffState.RESERVED:
                raise HandoffFailed(f"hand-off {self.ticket}: begin while {self.status}")
            if (first_token, num_tokens) != (plan.first_token, plan.num_tokens):
                raise HandoffFailed(
                    f"hand-off {self.ticket}: rows {first_token}..{first_token + num_tokens} announced where "
                    f"{plan.first_token}..{plan.first_token + plan.num_tokens} are reserved"
                )
            if reshard != plan.reshard:
                raise HandoffFailed(
                    f"hand-off {self.ticket}: cut by plan {reshard or 'unsharded'} where {plan.reshard or 'unsharded'} "
                    "is reserved"
                )
            self.link_id = link_id
            self._enter(HandoffState.SENDING)

    def chunk(
        self,
        byte_class: ByteClass,
        first_layer: int,
        num_layers: int,
        first_token: int,
        num_tokens: int,
        num_bytes: int,
    ) -> None:
        """These rows arrived: ``num_bytes`` of layers first_layer.. and tokens first_token... HandoffFailed if refused
        (wrong size, out of range, or a row that was there already)."""
        with self._lock:
            self._refuse_if(self.chunk_problem(byte_class, first_layer, num_layers, first_token, num_tokens, num_bytes))
            rows = ((1 << num_tokens) - 1) << (first_token - self.plan.first_token)
            if byte_class == HIDDEN:
                self._hidden_arrived |= rows
            for layer in self._crossing(range(first_layer, first_layer + num_layers)):
                self._arrived[layer] |= rows
            self.bytes_by_class[byte_class] += num_bytes

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

    def _token_bytes(self, layers: range) -> int:
        """Bytes of one token over ``layers`` (algorithms.md H4)."""
        layout = self.plan.layout
        return sum(layout.layers[layer].row_elems for layer in layers) * layout.dtype.itemsize

    def _crossing(self, layers: range) -> list[int]:
        """Those of ``layers`` that have a width: rows of the others neither arrive nor miss."""
        return [layer for layer in layers if self.plan.layout.layers[layer].row_elems]

    def _missing(self, drafts: bool) -> str | None:
        """The first layer with a missing row, in words."""
        draft = self.plan.layout.layer_range(LayerOwner.DRAFT)
        # Draft rows leave before it is known whether the first token ends the request.
        unused = not drafts or not any(self._arrived[layer] for layer in draft)
        draft_absent = unused and not self.plan.draft_required
        for layer in self._crossing(range(len(self._arrived))):
            arrived = self._arrived[layer]
            if arrived != self._complete and not (layer in draft and draft_absent):
                missing = self.plan.num_tokens - arrived.bit_count()
                return f"{missing} of {self.plan.num_tokens} rows of layer {layer} are missing"
        return None


def described(message: handoff_pb2.HandoffMessage) -> dict[str, str | float]:
    """What a trace says of a control message: byte class, layers, tokens, and the bytes that follow it."""
    if message.WhichOneof("body") == "state":
        return {"num_bytes": message.state.num_bytes}
    if message.WhichOneof("body") != "chunk":
        return {}
    chunk = message.chunk
    byte_class = handoff_pb2.ByteClass.Name(chunk.byte_class).removeprefix("BYTE_CLASS_").lower()
    return {
        "byte_class": byte_class,
        "first_layer": chunk.first_layer,
        "num_layers": chunk.num_layers,
        "first_token": chunk.first_token,
        "num_tokens": chunk.num_tokens,
        "num_bytes": chunk.num_bytes,
    }
