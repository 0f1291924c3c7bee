"""Gives the streams in line their pages, and with them a reservation. Everything here runs on the engine thread."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from decode_node.engine.ends import StreamEnds
from decode_node.engine.scheduler import DecodeScheduler
from decode_node.stream import HiddenRows, Landing, Stream, StreamPhase
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.state import Handoff
from kv_transfer.transports.side_stream import held_work
from paceline.engine.model_runner import ModelRunner
from paceline.errors import Overloaded, failed
from paceline.spec_decode.sequence import Sequence
from paceline.v1 import node_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandoffDeadlines:
    """Seconds."""

    reserve_s: float  # from the reservation to Begin
    handoff_s: float  # from Begin to State


class Reservations:
    """Lets streams in, first come, first served, each with pages for the worst case."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: DecodeScheduler[Stream],
        deadlines: HandoffDeadlines,
        ends: StreamEnds,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._deadlines = deadlines
        self._ends = ends

    def reserve(self) -> None:
        """Reserve for the head of the line while there are pages."""
        for stream, error in self._scheduler.reserve(self._reserve_for):
            log.error("reserving for %s failed", stream.request.request_id, exc_info=error)
            self._ends.fail(stream, failed("reservation", error))

    def _reserve_for(self, stream: Stream) -> bool:
        """Take pages for the worst case; False when the pool lacks them now."""
        if stream.seq is None:
            stream.seq = self._runner.new_sequence(stream.request, grammar=stream.grammar)
        seq = stream.seq
        try:
            self._runner.take_pages(seq, num_slots(self._runner, stream))
        except Overloaded:
            return False
        stream.trace.record("queued", stream.queued_at, time.monotonic(), cached_tokens=seq.cached_tokens)
        self._ends.count_pages()
        if seq.num_prefill - seq.cached_tokens <= stream.local_prefill_up_to:
            stream.local_prefill = True
        if stream.local_prefill:
            stream.phase = StreamPhase.PREFILLING
            self._scheduler.prefill(stream)
        else:
            stream.phase = StreamPhase.RESERVED
            stream.landing = self._landing(stream, seq)
        reserved = node_pb2.Reserved(
            ticket=stream.ticket, cached_tokens=seq.cached_tokens, local_prefill=stream.local_prefill
        )
        stream.events.push(node_pb2.DecodeEvent(reserved=reserved))
        return True

    def _landing(self, stream: Stream, seq: Sequence) -> Landing:
        expected = ExpectedRows(
            layout=self._runner.kv.layout,
            tokens=range(seq.cached_tokens, seq.num_prefill),
            hidden_size=self._runner.handoff.hidden_size,
            draft_required=False,  # missing draft state is never an error, only slower
            row_width=self._runner.handoff.row_width,
        )
        handoff = Handoff(
            stream.ticket,
            time.monotonic,
            expected,
            reserve_deadline_s=self._deadlines.reserve_s,
            handoff_deadline_s=self._deadlines.handoff_s,
            trace=stream.trace.on("receive"),
        )
        slots = seq.table.slots[: seq.num_prefill].clone()
        hidden = HiddenRows(seq.cached_tokens, seq.num_prefill - seq.cached_tokens)
        return Landing(handoff, tuple(seq.table.pages), slots, hidden, held_work(self._runner.kv.device))


def num_slots(runner: ModelRunner, stream: Stream) -> int:
    """KV slots that a stream may ever need: prompt, all output (resumed tokens included), one round of drafts."""
    return len(stream.request.prompt_token_ids) + stream.request.params.max_tokens + runner.spec_slots
