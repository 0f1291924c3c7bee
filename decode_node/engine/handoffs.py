"""What becomes of reservations: their hand-off completes, fails, or is given up. Everything here runs on the engine
thread.

A reservation belongs to the engine until Begin. From then on the link decides when its pages are safe: they stay until
the link said ``ready`` or ``failed``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Protocol

from decode_node.engine.ends import StreamEnds
from decode_node.engine.scheduler import DecodeScheduler
from decode_node.stream import Stream, StreamPhase
from kv_transfer.handoff.state import HandoffState
from paceline.engine.model_runner import ModelRunner
from paceline.errors import HandoffFailed
from paceline.kvcache.layout import LayerOwner
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.speculation import is_weightless
from paceline.v1 import handoff_pb2
from paceline.wire import finish_reason_from_proto

log = logging.getLogger(__name__)


class LinkControl(Protocol):
    """What the engine asks of the links. Thread-safe, and never blocks. For a ticket in flight ``failed`` follows."""

    def cancel(self, link_id: str, ticket: str) -> None:
        """Tell the sender of ``ticket`` that nobody wants it any more."""

    def fail(self, link_id: str, ticket: str, reason: str) -> None:
        """End the hand-off of ``ticket`` now."""


class Handoffs:
    """Moves streams from RESERVED on, or ends them. ``streams``: by ticket, only looked up here."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: DecodeScheduler[Stream],
        streams: Mapping[str, Stream],
        ends: StreamEnds,
        links: LinkControl,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._streams = streams
        self._ends = ends
        self._links = links
        self.missing_drafts = 0  # hand-offs that brought no draft state though there is a drafter to feed

    def ready(self, ticket: str, state: handoff_pb2.State, draft: DraftState | None) -> None:
        """Every row is in place: decode, unless the client left or the first token ended the request."""
        stream = self._streams.get(ticket)
        if stream is None or stream.seq is None or stream.landing is None:
            return
        seq = stream.seq
        since = stream.landing.handoff.entered_at[HandoffState.RESERVED]
        stream.trace.record("hand-off", since, time.monotonic())
        seq.token_ids.append(state.first_token_id)
        seq.num_computed = seq.num_prefill
        seq.finish_reason = finish_reason_from_proto(state.finish_reason)
        if stream.landing.handoff.draft_complete:
            seq.draft, seq.draft_rows = draft, seq.num_prefill
        elif not len(self._runner.kv.layout.layer_range(LayerOwner.DRAFT)):
            seq.draft = draft
        if stream.left:
            self._ends.release(stream)
        elif seq.finish_reason is not None:
            self._ends.finish(stream, seq)
        elif self._owes_draft_prefill(stream):
            stream.draft_prefilled = seq.cached_tokens
            stream.phase = StreamPhase.DRAFTING
            self._scheduler.draft(stream)
        else:
            stream.phase = StreamPhase.RUNNING
            self._scheduler.run(stream)
            if self._lacks_draft(stream, seq):
                self.missing_drafts += 1
                log.warning("%s came without draft state: its drafter starts late", stream.request.request_id)
                stream.draft_prefilled = seq.draft_rows
                self._scheduler.recover(stream)

    def failed(self, ticket: str, reason: str) -> None:
        """The hand-off is over and nothing of it is used: pages return, the RPC ends with ABORTED."""
        stream = self._streams.get(ticket)
        if stream is not None:
            self._ends.fail(stream, HandoffFailed(f"hand-off {ticket} failed: {reason}"))

    def cancel(self, stream: Stream, reason: str) -> None:
        """Give a reservation up that nobody wants any more; after Begin the sender has the last word."""
        assert stream.landing is not None
        handoff = stream.landing.handoff
        if handoff.fail_reserved(reason):
            self.failed(stream.ticket, reason)
        else:
            self._links.cancel(handoff.link_id, stream.ticket)

    def expire(self, now: float) -> None:
        """Apply the deadlines, from reservation to Begin and from Begin to State. The sender is not waited for."""
        for stream in list(self._streams.values()):
            if stream.phase is not StreamPhase.RESERVED or stream.landing is None or stream.overdue:
                continue
            handoff = stream.landing.handoff
            reason = handoff.expired(now)
            if reason is None:
                continue
            # From here on the hand-off fails for good or is READY already; a second call could change nothing.
            stream.overdue = handoff.status is not HandoffState.RESERVED
            if handoff.fail_reserved(reason):
                self.failed(stream.ticket, reason)
            else:
                self._links.fail(handoff.link_id, stream.ticket, reason)

    def _owes_draft_prefill(self, stream: Stream) -> bool:
        """Whether hidden rows came for the drafter, or it needs nothing but the tokens."""
        runner = self._runner
        if runner.handoff.mode != "hidden_states" or stream.landing is None or _weightless(stream):
            return False
        tokens_alone = runner.handoff.row_width == 0 and len(runner.drafter.kv_layers) > 0
        return tokens_alone or stream.landing.handoff.hidden_complete

    def _lacks_draft(self, stream: Stream, seq: Sequence) -> bool:
        """Whether the drafter has rows of its own, and those of the prompt should have come, but did not."""
        layers = len(self._runner.kv.layout.layer_range(LayerOwner.DRAFT))
        wanted = layers > 0 and self._runner.handoff.mode != "none" and not _weightless(stream)
        return wanted and seq.draft_rows < seq.num_prefill


def _weightless(stream: Stream) -> bool:
    """The request chose a drafter that has no rows."""
    return is_weightless(stream.request.speculation.drafter)
