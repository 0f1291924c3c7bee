"""How a stream ends, and how its pages come back. Everything here runs on the engine thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from decode_node.engine.scheduler import DecodeScheduler
from decode_node.stream import Stream, StreamPhase
from kv_transfer.handoff.state import HandoffState
from paceline.engine.model_runner import ModelRunner
from paceline.errors import PacelineError, failed
from paceline.serving.ledger import PageLedger
from paceline.spec_decode.sequence import Sequence
from paceline.v1 import node_pb2
from paceline.wire import finish_reason_to_proto

log = logging.getLogger(__name__)


class StreamEnds:
    """Takes streams out of the scheduler and of ``streams`` (by ticket), and gives their pages back."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: DecodeScheduler[Stream],
        streams: dict[str, Stream],
        pages: PageLedger,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._streams = streams
        self._pages = pages

    def finish(self, stream: Stream, seq: Sequence) -> None:
        """End a stream whose sequence is complete. Pages first, then the word: who reads Finished may count on them."""
        stream.trace.record("finished", num_output=seq.num_output, reason=seq.finish_reason or "")
        self.release(stream)
        finished = node_pb2.Finished(finish_reason=finish_reason_to_proto(seq.finish_reason))
        stream.events.push(node_pb2.DecodeEvent(finished=finished))

    def fail_step(self, streams: Seq[Stream], what: str, error: Exception) -> None:
        """End the streams of a step that raised."""
        log.error("%s step of %s failed", what, [s.request.request_id for s in streams], exc_info=error)
        for stream in streams:
            self.fail(stream, failed(what, error))

    def fail(self, stream: Stream, error: PacelineError) -> None:
        """End a stream that no hand-off writes to. Its rows are not to be trusted, so they enter no cache."""
        if stream.seq is not None:
            stream.seq.table.release()
        stream.trace.record("failed", reason=str(error))
        self.release(stream)
        stream.events.push(error)

    def release(self, stream: Stream) -> None:
        """Forget a stream that no hand-off writes to, and give its pages back."""
        self._scheduler.discard(stream)
        self._streams.pop(stream.ticket, None)
        stream.phase = StreamPhase.RELEASED
        if stream.seq is not None:
            self._runner.release(stream.seq)
        if stream.landing is not None and stream.landing.handoff.status is HandoffState.READY:
            stream.landing.handoff.release()
        stream.trace.record("pages released")
        self.count_pages()

    def count_pages(self) -> None:
        """Pages were taken or given back."""
        self._pages.count(stream.seq for stream in self._streams.values() if stream.seq is not None)
