"""The decode engine: reserve, prefill locally where asked, run one draft-verify round for all. Everything here runs
on the engine thread; RPCs, links and timers post to it.

Who gives pages back: the engine, at a step boundary, for a stream that no hand-off can write to; for one whose
hand-off has begun, only after the link said ``ready`` or ``failed``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from decode_node.scheduler import DecodeLimits, DecodeScheduler
from decode_node.stream import HiddenRows, Landing, Stream, StreamPhase
from kv_transfer.handoff.state import Handoff, HandoffPlan, HandoffState
from paceline.engine.model_runner import ModelRunner, RoundResult
from paceline.errors import HandoffFailed, Overloaded, PacelineError
from paceline.kvcache.layout import LayerOwner
from paceline.request import TokenLogprobs
from paceline.serving.ledger import pages_available, pool_problems
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.speculation import is_weightless
from paceline.v1 import handoff_pb2, node_pb2
from paceline.wire import finish_reason_from_proto, finish_reason_to_proto, logprobs_to_proto, round_to_proto

log = logging.getLogger(__name__)


class LinkControl(Protocol):
    """What the engine asks of the links; thread-safe, never blocks. Of a ticket in flight ``failed`` follows."""

    def cancel(self, link_id: str, ticket: str) -> None: ...
    def fail(self, link_id: str, ticket: str, reason: str) -> None: ...


@dataclass(frozen=True)
class HandoffDeadlines:
    """Seconds."""

    reserve_s: float  # from the reservation to Begin
    handoff_s: float  # from Begin to State


class DecodeEngine:
    """Owns the runner and every stream."""

    def __init__(self, runner: ModelRunner, limits: DecodeLimits, deadlines: HandoffDeadlines) -> None:
        self._runner = runner
        self._deadlines = deadlines
        self._scheduler: DecodeScheduler[Stream] = DecodeScheduler(limits)
        self._links: LinkControl | None = None
        self._unchecked = True
        self.streams: dict[str, Stream] = {}  # by ticket, until RELEASED; other threads only look up
        self.free_pages = runner.allocator.num_pages  # that new requests can get
        self.integrity = ""  # of the last idle moment
        self.missing_drafts = 0  # hand-offs that brought no draft state though there is a drafter to feed
        self.recovered_drafts = 0  # of them, those whose drafter has caught up

    def bind(self, links: LinkControl) -> None:
        """Set the links, which need the engine themselves, before the first hand-off."""
        self._links = links

    @property
    def num_running(self) -> int:
        """Sequences that decode or prefill here."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Streams in line for pages."""
        return self._scheduler.num_waiting

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Reserve for who waits, run a chunk of local prefill and a round. False when there was nothing to do."""
        self._reserve_waiting()
        prefilled = self._prefill()
        digested = self._digest()
        decoded = self._round()
        recovered = not prefilled and not digested and self._recover()
        if not prefilled and not digested and not decoded and not recovered:
            self._check_when_idle()
        return prefilled or digested or decoded or recovered

    def _reserve_waiting(self) -> None:
        for stream, error in self._scheduler.reserve(self._reserve):
            log.error("reserving for %s failed", stream.request.request_id, exc_info=error)
            self._fail(stream, PacelineError(f"reservation failed: {error!r}"))

    def _reserve(self, stream: Stream) -> bool:
        """Take pages for the worst case; False when the pool lacks them now."""
        if stream.seq is None:
            stream.seq = self._runner.new_sequence(stream.request)
        seq = stream.seq
        try:
            seq.table.ensure(num_slots(self._runner, stream))
        except Overloaded:
            return False
        stream.trace.record("queued", stream.queued_at, time.monotonic(), cached_tokens=seq.cached_tokens)
        self._count_pages()
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
        plan = HandoffPlan(
            layout=self._runner.kv.layout,
            first_token=seq.cached_tokens,
            num_tokens=seq.num_prefill - seq.cached_tokens,
            hidden_size=self._runner.hidden_size,
            draft_required=False,  # missing draft state is never an error, only slower
            row_width=self._runner.row_width,
        )
        handoff = Handoff(
            stream.ticket,
            time.monotonic,
            plan,
            reserve_deadline_s=self._deadlines.reserve_s,
            handoff_deadline_s=self._deadlines.handoff_s,
            trace=stream.trace.on("receive"),
        )
        slots = seq.table.slots[: seq.num_prefill].clone()
        return Landing(handoff, tuple(seq.table.pages), slots, HiddenRows(plan.first_token, plan.num_tokens))

    def _prefill(self) -> bool:
        step = self._scheduler.next_chunks()
        if not step:
            return False
        began = time.monotonic()
        try:
            results = self._runner.prefill([chunk for _, chunk in step])
        except Exception as error:
            self._fail_step([stream for stream, _ in step], "prefill", error)
            return True
        ended = time.monotonic()
        for (stream, chunk), sampled in zip(step, results, strict=True):
            stream.trace.record("chunk", began, ended, first_token=chunk.start, end_token=chunk.end, batch=len(step))
            if sampled is not None:
                stream.phase = StreamPhase.RUNNING
                self._scheduler.run(stream)
                self._emit(stream, (sampled.token_id,), (sampled.logprobs,) if sampled.logprobs else (), None)
        return True

    def _digest(self) -> bool:
        """A chunk of one stream's draft prefill (algorithms.md H2)."""
        if (work := self._scheduler.next_draft()) is None:
            return False
        stream, most = work
        seq, landing = stream.seq, stream.landing
        assert seq is not None
        assert landing is not None
        began, start, end = time.monotonic(), stream.digested, min(stream.digested + most, seq.num_prefill)
        try:
            self._runner.digest(seq, start, end, landing.hidden.read(start, end))
        except Exception as error:
            self._fail_step([stream], "draft prefill", error)
            return True
        stream.digested = end
        stream.trace.record("draft prefill", began, time.monotonic(), first_token=start, end_token=end)
        if end == seq.num_prefill:
            landing.hidden.drop()
            stream.phase = StreamPhase.RUNNING
            self._scheduler.run(stream)
        return True

    def _recover(self) -> bool:
        """A chunk of a stream that came without draft state: its hidden rows again, for the drafter."""
        if (work := self._scheduler.next_recovery()) is None:
            return False
        stream, most = work
        seq = stream.seq
        assert seq is not None
        began, start = time.monotonic(), stream.digested
        try:
            stream.digested = self._runner.recover_draft(seq, start, most)
        except Exception:
            log.error("%s goes on without its drafter", stream.request.request_id, exc_info=True)
            self._scheduler.end_recovery(stream)
            return True
        stream.trace.record("draft recovery", began, time.monotonic(), first_token=start, end_token=stream.digested)
        if stream.digested == seq.num_computed:
            self._scheduler.end_recovery(stream)
            self.recovered_drafts += 1
        return True

    def _round(self) -> bool:
        batch = self._scheduler.next_batch()
        if not batch:
            return False
        began = time.monotonic()
        try:
            results = self._runner.decode([stream.seq for stream in batch if stream.seq is not None])
        except Exception as error:
            self._fail_step(batch, "decode", error)
            return True
        ended = time.monotonic()
        for stream, result in zip(batch, results, strict=True):
            _record_round(stream, result, began, ended, len(batch))
            self._emit(stream, result.token_ids, result.logprobs, result)
        return True

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
            self._finish(stream, seq)

    def _finish(self, stream: Stream, seq: Sequence) -> None:
        """Pages first, then the word: who reads Finished may count on the pages."""
        stream.trace.record("finished", num_output=seq.num_output, reason=seq.finish_reason or "")
        self._release(stream)
        finished = node_pb2.Finished(finish_reason=finish_reason_to_proto(seq.finish_reason))
        stream.events.push(node_pb2.DecodeEvent(finished=finished))

    # -- hand-offs ---------------------------------------------------------------------------------------------

    def handoff_ready(self, ticket: str, state: handoff_pb2.State, draft: DraftState | None) -> None:
        """Every row is in place: decode, unless the client left or the first token ended the request."""
        stream = self.streams.get(ticket)
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
            self._release(stream)
        elif seq.finish_reason is not None:
            self._finish(stream, seq)
        elif self._owes_draft_prefill(stream):
            stream.digested = seq.cached_tokens
            stream.phase = StreamPhase.DRAFTING
            self._scheduler.draft(stream)
        else:
            stream.phase = StreamPhase.RUNNING
            self._scheduler.run(stream)
            if self._lacks_draft(stream, seq):
                self.missing_drafts += 1
                log.warning("%s came without draft state: its drafter starts late", stream.request.request_id)
                stream.digested = seq.draft_rows
                self._scheduler.recover(stream)

    def _owes_draft_prefill(self, stream: Stream) -> bool:
        """Hidden rows came for the drafter to digest, or it needs nothing but the tokens."""
        runner = self._runner
        if runner.handoff != "hidden_states" or stream.landing is None or _weightless(stream):
            return False
        tokens_alone = runner.row_width == 0 and len(runner.drafter.kv_layers) > 0
        return tokens_alone or stream.landing.handoff.hidden_complete

    def handoff_failed(self, ticket: str, reason: str) -> None:
        """The hand-off is over and nothing of it is used: pages return, the RPC ends with ABORTED."""
        stream = self.streams.get(ticket)
        if stream is not None:
            self._fail(stream, HandoffFailed(f"hand-off {ticket} failed: {reason}"))

    def _end_handoff(self, stream: Stream, reason: str, *, now: bool) -> None:
        """Give a reservation up. Before Begin it is ours; after it, the link decides when the pages are safe.

        ``now``: at a deadline, without waiting for the sender's last word.
        """
        assert stream.landing is not None
        handoff = stream.landing.handoff
        if handoff.fail_reserved(reason):
            self.handoff_failed(stream.ticket, reason)
        elif self._links is not None and now:
            self._links.fail(handoff.link_id, stream.ticket, reason)
        elif self._links is not None:
            self._links.cancel(handoff.link_id, stream.ticket)

    def _lacks_draft(self, stream: Stream, seq: Sequence) -> bool:
        """The drafter has rows of its own, and those of the prompt should have come, but did not."""
        layers = len(self._runner.kv.layout.layer_range(LayerOwner.DRAFT))
        wanted = layers > 0 and self._runner.handoff != "none" and not _weightless(stream)
        return wanted and seq.draft_rows < seq.num_prefill

    # -- what the RPCs and timers post -------------------------------------------------------------------------

    def submit(self, stream: Stream) -> None:
        """Queue a stream for pages; raises Overloaded when the line is full."""
        self._scheduler.add(stream)
        self.streams[stream.ticket] = stream
        self._unchecked = True
        self._reserve_waiting()  # now, so that a burst counts against the line only when there is no room

    def leave(self, stream: Stream) -> None:
        """The RPC is over. Nothing happens when the stream ended by itself."""
        if stream.phase is StreamPhase.RELEASED or stream.left or stream.ticket not in self.streams:
            return
        stream.left = True
        stream.trace.record("client left")
        if stream.phase is StreamPhase.RESERVED:
            self._end_handoff(stream, "the client left", now=False)
        else:
            self._release(stream)

    def expire(self) -> None:
        """Apply the deadlines: in line, from reservation to Begin, from Begin to State."""
        now = time.monotonic()
        for stream in self._scheduler.expire(now):
            self._fail(stream, Overloaded("no KV pages became free in time on the decode node"))
        for stream in list(self.streams.values()):
            if stream.phase is not StreamPhase.RESERVED or stream.landing is None or stream.overdue:
                continue
            reason = stream.landing.handoff.expired(now)
            if reason is not None:
                # From here on the hand-off fails for good or is READY already; a second call could change nothing.
                stream.overdue = stream.landing.handoff.status is not HandoffState.RESERVED
                self._end_handoff(stream, reason, now=True)

    # -- ends --------------------------------------------------------------------------------------------------

    def _fail_step(self, streams: Seq[Stream], what: str, error: Exception) -> None:
        log.error("%s step of %s failed", what, [s.request.request_id for s in streams], exc_info=error)
        for stream in streams:
            self._fail(stream, PacelineError(f"{what} failed: {error!r}"))

    def _fail(self, stream: Stream, error: PacelineError) -> None:
        """End a stream that no hand-off writes to. Its rows are not to be trusted, so they enter no cache."""
        if stream.seq is not None:
            stream.seq.table.release()
        stream.trace.record("failed", reason=str(error))
        self._release(stream)
        stream.events.push(error)

    def _release(self, stream: Stream) -> None:
        self._scheduler.discard(stream)
        self.streams.pop(stream.ticket, None)
        stream.phase = StreamPhase.RELEASED
        if stream.seq is not None:
            self._runner.release(stream.seq)
        if stream.landing is not None and stream.landing.handoff.status is HandoffState.READY:
            stream.landing.handoff.release()
        stream.trace.record("pages released")
        self._count_pages()

    def _count_pages(self) -> None:
        self.free_pages = pages_available(self._runner, [s.seq for s in self.streams.values() if s.seq is not None])

    def _check_when_idle(self) -> None:
        if self._unchecked and not self.streams:
            self._unchecked = False
            problems = pool_problems(self._runner, [])
            self.integrity = problems[0] if problems else ""
            for problem in problems:
                log.error("KV pool of the decode node: %s", problem)


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


def _weightless(stream: Stream) -> bool:
    """The request chose a drafter that has no rows."""
    return is_weightless(stream.request.speculation.drafter)


def num_slots(runner: ModelRunner, stream: Stream) -> int:
    """KV slots that a stream may ever need: prompt, all output (resumed tokens included), one round of drafts."""
    return len(stream.request.prompt_token_ids) + stream.request.params.max_tokens + runner.spec_slots
