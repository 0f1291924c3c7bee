"""The decode engine: reserve, prefill locally where asked, run one draft-verify round for all. Everything here runs
on the engine thread; RPCs, links and timers post to it.

Who gives pages back: the engine, at a step boundary, for a stream that no hand-off can write to; for one whose
hand-off has begun, only after the link said ``ready`` or ``failed``.
"""

from __future__ import annotations

import time

from decode_node.engine.ends import StreamEnds
from decode_node.engine.handoffs import Handoffs, LinkControl
from decode_node.engine.reservations import HandoffDeadlines, Reservations
from decode_node.engine.scheduler import DecodeLimits, DecodeScheduler
from decode_node.engine.work import ModelWork
from decode_node.stream import Stream, StreamPhase
from kv_transfer.handoff.state import HandoffState
from paceline.engine.model_runner import ModelRunner
from paceline.errors import Overloaded, failed
from paceline.serving.ledger import PageLedger
from paceline.spec_decode.sequence import DraftState
from paceline.v1 import handoff_pb2


class DecodeEngine:
    """Owns the runner and every stream.

    ``streams``: by ticket, until RELEASED. The engine alone changes it; other threads only look up.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: DecodeLimits,
        deadlines: HandoffDeadlines,
        streams: dict[str, Stream],
        links: LinkControl,
    ) -> None:
        self.streams = streams
        self.pages = PageLedger(runner, "decode")
        self._scheduler: DecodeScheduler[Stream] = DecodeScheduler(limits)
        self._ends = StreamEnds(runner, self._scheduler, streams, self.pages)
        self._reservations = Reservations(runner, self._scheduler, deadlines, self._ends)
        self._work = ModelWork(runner, self._scheduler, self._ends)
        self._handoffs = Handoffs(runner, self._scheduler, streams, self._ends, links)

    # -- what it tells, from any thread ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that decode or prefill here."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Streams in line for pages."""
        return self._scheduler.num_waiting

    @property
    def num_held(self) -> int:
        """Streams whose pages are not back yet, those in line counted."""
        return len(self.streams)

    @property
    def missing_drafts(self) -> int:
        """Hand-offs that brought no draft state though there is a drafter to feed."""
        return self._handoffs.missing_drafts

    @property
    def recovered_drafts(self) -> int:
        """Streams among them whose drafter has caught up."""
        return self._work.recovered_drafts

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Reserve for who waits, then run chunks of local prefill, a chunk of draft prefill and a round, and
        where no prefill waited a chunk for a drafter that got nothing. False when there was nothing to run."""
        self._reservations.reserve()
        prefilled = self._work.prefill()
        draft_prefilled = self._work.draft_prefill()
        decoded = self._work.decode()
        recovered = not prefilled and not draft_prefilled and self._work.recover()
        worked = prefilled or draft_prefilled or decoded or recovered
        if not worked and not self.streams:
            self.pages.check()
        return worked

    # -- what RPCs, links and timers post ----------------------------------------------------------------------

    def submit(self, stream: Stream) -> None:
        """Queue a stream for pages; raises Overloaded when the line is full."""
        self._scheduler.add(stream)
        self.streams[stream.ticket] = stream
        self._reservations.reserve()  # now, so that a burst counts against the line only when there is no room

    def handoff_ready(self, ticket: str, state: handoff_pb2.State, draft: DraftState | None) -> None:
        """Every row of a hand-off is in place. ``draft``: the drafter's state, where it crossed."""
        self._handoffs.ready(ticket, state, draft)

    def handoff_failed(self, ticket: str, reason: str) -> None:
        """A hand-off is over, and none of its rows will be written any more."""
        self._handoffs.failed(ticket, reason)

    def fail(self, ticket: str, error: Exception) -> None:
        """What was posted about a stream raised: end it, and give its pages back. Only where no hand-off writes to it
        any more; one that is in flight is ended by its link."""
        stream = self.streams.get(ticket)
        if stream is None:
            return
        handoff = stream.landing.handoff if stream.landing is not None else None
        if handoff is None or handoff.fail_reserved(str(error)) or handoff.status is not HandoffState.SENDING:
            self._ends.fail(stream, failed(stream.request.request_id, error))

    def leave(self, stream: Stream) -> None:
        """The RPC is over. Nothing happens when the stream ended by itself."""
        if stream.phase is StreamPhase.RELEASED or stream.left or stream.ticket not in self.streams:
            return
        stream.left = True
        stream.trace.record("client left")
        if stream.phase is StreamPhase.RESERVED:
            self._handoffs.cancel(stream, "the client left")
        else:
            self._ends.release(stream)

    def expire(self) -> None:
        """Apply the deadlines of the line and of the hand-offs."""
        now = time.monotonic()
        for stream in self._scheduler.expire(now):
            self._ends.fail(stream, Overloaded("no KV pages became free in time on the decode node"))
        self._handoffs.expire(now)
