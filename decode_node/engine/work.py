"""The kinds of work in a step: chunks of local prefill, a chunk of draft prefill, a draft-verify round, and a chunk of
rows for a drafter that got none.
Everything here runs on the engine thread.

Each asks the scheduler who is next, runs the model, and tells the streams what came of it. It returns whether there was
anything to do.
"""

from __future__ import annotations

import logging
import time

from decode_node.engine.ends import StreamEnds
from decode_node.engine.scheduler import DecodeScheduler
from decode_node.stream import Stream, StreamPhase, told_together
from paceline.engine.model_runner import ModelRunner, RoundResult
from paceline.request import TokenLogprobs
from paceline.v1 import node_pb2
from paceline.wire import logprobs_to_proto, prompt_logprobs_to_proto, round_to_proto

log = logging.getLogger(__name__)


class ModelWork:
    """Runs the model for the streams that the scheduler names. Work that raises ends its own streams and no others."""

    def __init__(self, runner: ModelRunner, scheduler: DecodeScheduler[Stream], ends: StreamEnds) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._ends = ends
        self.recovered_drafts = 0  # streams that came without draft state and whose drafter has caught up

    def prefill(self) -> bool:
        """Compute chunks of the prompts that are prefilled here."""
        step = self._scheduler.next_chunks()
        if not step:
            return False
        began = time.monotonic()
        try:
            results = self._runner.prefill([chunk for _, chunk in step])
        except Exception as error:
            self._ends.fail_step([stream for stream, _ in step], "prefill", error)
            return True
        ended = time.monotonic()
        for (stream, chunk), sampled in zip(step, results, strict=True):
            stream.trace.record("chunk", began, ended, first_token=chunk.start, end_token=chunk.end, batch=len(step))
            assert stream.seq is not None
            for message in prompt_logprobs_to_proto(*stream.seq.take_prompt_logprobs()):
                stream.events.push(node_pb2.DecodeEvent(prompt_logprobs=message))
            if sampled is not None and not self._failed(stream):
                self._run(stream)
                self._emit(stream, (sampled.token_id,), (sampled.logprobs,) if sampled.logprobs else (), None)
        return True

    def draft_prefill(self) -> bool:
        """Give the drafter a chunk of one stream's hidden rows (algorithms.md H2)."""
        if (work := self._scheduler.next_draft()) is None:
            return False
        stream, most = work
        seq, landing = stream.seq, stream.landing
        assert seq is not None
        assert landing is not None
        start = stream.draft_prefilled
        began, end = time.monotonic(), min(start + most, seq.num_prefill)
        try:
            self._runner.digest(seq, start, end, landing.hidden.read(start, end))
        except Exception as error:
            self._ends.fail_step([stream], "draft prefill", error)
            return True
        stream.draft_prefilled = end
        stream.trace.record("draft prefill", began, time.monotonic(), first_token=start, end_token=end)
        if end == seq.num_prefill:
            landing.hidden.drop()
            self._run(stream)
        return True

    def recover(self) -> bool:
        """Compute a chunk of a stream's hidden rows again, for its drafter. The stream decodes meanwhile."""
        if (work := self._scheduler.next_recovery()) is None:
            return False
        stream, most = work
        seq = stream.seq
        assert seq is not None
        began, start = time.monotonic(), stream.draft_prefilled
        try:
            end = self._runner.recover_draft(seq, start, most)
        except Exception:
            log.error("%s goes on without its drafter", stream.request.request_id, exc_info=True)
            self._scheduler.end_recovery(stream)
            return True
        stream.draft_prefilled = end
        stream.trace.record("draft recovery", began, time.monotonic(), first_token=start, end_token=end)
        if end == seq.num_computed:
            self._scheduler.end_recovery(stream)
            self.recovered_drafts += 1
        return True

    def decode(self) -> bool:
        """Draft and verify once for every stream that has a seat."""
        batch = self._scheduler.next_batch()
        if not batch:
            return False
        began = time.monotonic()
        try:
            results = self._runner.decode([stream.seq for stream in batch if stream.seq is not None])
        except Exception as error:
            self._ends.fail_step(batch, "decode", error)
            return True
        ended = time.monotonic()
        with told_together():
            for stream, result in zip(batch, results, strict=True):
                _record_round(stream, result, began, ended, len(batch))
                if not self._failed(stream):
                    self._emit(stream, result.token_ids, result.logprobs, result)
        return True

    def _failed(self, stream: Stream) -> bool:
        """End a stream whose grammar could not go on."""
        if stream.seq is None or stream.seq.failure is None:
            return False
        self._ends.fail(stream, stream.seq.failure)
        return True

    def _run(self, stream: Stream) -> None:
        stream.phase = StreamPhase.RUNNING
        self._scheduler.run(stream)

    def _emit(
        self,
        stream: Stream,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        result: RoundResult | None,
    ) -> None:
        seq = stream.seq
        assert seq is not None
        tokens = node_pb2.Tokens(
            first_index=seq.num_output - len(token_ids),
            token_ids=token_ids,
            logprobs=[logprobs_to_proto(entry) for entry in logprobs],
            cached_tokens=seq.cached_tokens if stream.local_prefill else 0,
        )
        if result is not None:
            tokens.round.CopyFrom(round_to_proto(result.round))
        stream.events.push(node_pb2.DecodeEvent(tokens=tokens))
        if seq.finish_reason is not None:
            self._ends.finish(stream, seq)


def _record_round(stream: Stream, result: RoundResult, began: float, ended: float, batch: int) -> None:
    done = result.round
    stream.trace.record(
        "round",
        began,
        ended,
        drafter=done.drafter,
        drafted=done.num_draft_tokens,
        accepted=done.num_accepted,
        draft_s=done.draft_s,
        verify_s=done.verify_s,
        batch=batch,
    )
