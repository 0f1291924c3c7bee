"""The prefill engine: chunked prefill, rows handed over while later layers and chunks compute. Everything here runs on
the engine thread; the RPCs and the links post to it.

Rows leave at the layer that completes a group (groups.py), in the midst of a step; whatever ends a job or its hand-off
is posted, and so takes effect between two steps: a job that a step computes holds its pages until that step's end.

Pages of a begun hand-off come back only when it is terminal (acknowledged, or the link is gone and no send reads
them any more): the one edge to that is ``handoff_ended``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from kv_transfer.handoff.state import DRAFT_KV, HIDDEN, META, TARGET_KV, ByteClass
from paceline.engine.model_runner import ModelRunner, PrefillChunk, SampledToken
from paceline.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, Overloaded, PacelineError
from paceline.kvcache.layout import LayerOwner
from paceline.models.base import AfterLayer
from paceline.serving.ledger import pages_available, pool_problems
from paceline.spec_decode.drafters.row_exporter import take_rows
from paceline.speculation import is_weightless
from paceline.tracing import NO_TRACE, Trace
from paceline.v1 import handoff_pb2, inference_pb2, node_pb2
from paceline.wire import finish_reason_to_proto, logprobs_to_proto
from prefill_node.groups import MIN_BYTES
from prefill_node.job import JobPhase, PrefillJob
from prefill_node.scheduler import PrefillLimits, PrefillScheduler

log = logging.getLogger(__name__)


class PrefillEngine:
    """Owns the runner and every job. ``answer_timeout_s``: longest wait for the peer's answer once all is queued."""

    def __init__(self, runner: ModelRunner, limits: PrefillLimits, answer_timeout_s: float) -> None:
        self._runner = runner
        self._scheduler: PrefillScheduler[PrefillJob] = PrefillScheduler(limits)
        self._answer_timeout_s = answer_timeout_s
        self._target_layers = runner.kv.layout.layer_range(LayerOwner.TARGET)
        self._jobs: dict[str, PrefillJob] = {}  # by ticket, until RELEASED
        self._unchecked = True
        self.free_pages = runner.allocator.num_pages  # that new requests can get
        self.integrity = ""  # of the last idle moment

    @property
    def num_held(self) -> int:
        """Jobs whose pages are not back yet."""
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        """Jobs in line."""
        return self._scheduler.num_waiting

    def trace_of(self, ticket: str) -> Trace:
        """Where a job that holds pages is recorded. From any thread."""
        job = self._jobs.get(ticket)
        return NO_TRACE if job is None else job.trace

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit, run one forward over the next chunks, hand over what it made. False when there was nothing to do."""
        self._admit_waiting()
        step = self._scheduler.next_chunks()
        if not step:
            self._check_when_idle()
            return False
        self._send_cached_rows(step)
        began = time.monotonic()
        try:
            results = self._runner.prefill([chunk for _, chunk in step], self._sends_of(step))
        except Exception as error:
            log.exception("prefill step of %s failed", [job.request.request_id for job, _ in step])
            for job, _ in step:
                self.give_up(job, _internal(error))
        else:
            ended = time.monotonic()
            for (job, chunk), result in zip(step, results, strict=True):
                job.trace.record("chunk", began, ended, first_token=chunk.start, end_token=chunk.end, batch=len(step))
                self._postprocess(job, chunk, result)
        return True

    def _admit_waiting(self) -> None:
        for job, error in self._scheduler.admit(self._start):
            log.error("starting %s failed", job.request.request_id, exc_info=error)
            self.give_up(job, _internal(error))

    def _start(self, job: PrefillJob) -> bool:
        """Take pages for the whole prompt; False when the pool lacks them now."""
        if job.seq is None:
            # Cached rows have KV but no hidden rows: of those that are to cross, all are computed.
            most = job.first_token if self._runner.row_width else None
            job.seq = self._runner.new_sequence(job.request, most)
        try:
            job.seq.table.ensure(job.seq.num_prefill + 1)
        except Overloaded:
            return False
        self._count_pages()
        job.phase = JobPhase.COMPUTING
        job.trace.record("queued", job.queued_at, time.monotonic(), cached_tokens=job.seq.cached_tokens)
        return True

    def _postprocess(self, job: PrefillJob, chunk: PrefillChunk, sampled: SampledToken | None) -> None:
        if sampled is not None:
            self._emit_first_token(job, sampled)
        self._begin(job)
        self._send_hidden(job)
        if sampled is not None:
            self._finish(job, sampled)
        else:
            self._send_draft(job, last=False)

    def _emit_first_token(self, job: PrefillJob, sampled: SampledToken) -> None:
        """Before any byte of the hand-off's end: time to first token does not wait for it."""
        assert job.seq is not None
        job.computed_at = time.monotonic()
        job.trace.record("first token", job.computed_at)
        token = node_pb2.FirstToken(
            token_id=sampled.token_id,
            logprobs=logprobs_to_proto(sampled.logprobs) if sampled.logprobs else None,
            finish_reason=finish_reason_to_proto(job.seq.finish_reason),
            cached_tokens=job.seq.cached_tokens,
        )
        job.emit(node_pb2.PrefillEvent(first_token=token))

    # -- the hand-off ------------------------------------------------------------------------------------------

    def _send_cached_rows(self, step: Seq[tuple[PrefillJob, PrefillChunk]]) -> None:
        """Before a job's first chunk: the rows that the prefix cache had and decode lacks."""
        for job, chunk in step:
            if not job.begun and job.first_token < chunk.start:
                self._begin(job)
                self._send_rows(job, TARGET_KV, self._target_layers, job.first_token, chunk.start)
                self._send_draft(job, last=False)

    def _sends_of(self, step: Seq[tuple[PrefillJob, PrefillChunk]]) -> AfterLayer:
        """What a step does after each layer: send the rows of the groups that are complete with it."""
        due: dict[int, list[Callable[[], None]]] = {}
        for job, chunk in step:
            first = max(chunk.start, job.first_token)
            groups = job.link.groups(self._target_layers, chunk.end - first) if first < chunk.end else ()
            for layers in groups:
                send = partial(self._send_group, job, layers, first, chunk.end)
                due.setdefault(layers[-1], []).append(send)

        def after_layer(layer: int) -> None:
            for send in due.get(layer, ()):
                send()

        return after_layer

    def _send_group(self, job: PrefillJob, layers: range, start: int, end: int) -> None:
        self._begin(job)
        self._send_rows(job, TARGET_KV, layers, start, end)

    def _begin(self, job: PrefillJob) -> None:
        if not job.begun:
            assert job.seq is not None
            job.begun = True
            job.trace.record("hand-off begin", first_token=job.first_token, end_token=job.seq.num_prefill)
            job.link.begin(job.ticket, job.first_token, job.seq.num_prefill - job.first_token)

    @staticmethod
    def _send_rows(job: PrefillJob, byte_class: ByteClass, layers: range, start: int, end: int) -> None:
        if job.seq is not None and start < end and len(layers):
            job.link.rows(job.ticket, byte_class, layers, job.seq.table.slots[start:end], start)

    def _send_draft(self, job: PrefillJob, *, last: bool) -> None:
        """Draft rows that are settled; before the last ones only as many as are worth a message."""
        seq = job.seq
        if seq is None or is_weightless(job.request.speculation.drafter):
            return
        layers = self._runner.kv.layout.layer_range(LayerOwner.DRAFT)
        start, end = max(job.first_token, job.draft_sent), self._runner.settled_draft_rows(seq)
        worth = (end - start) * self._runner.kv.layout.token_bytes(LayerOwner.DRAFT) >= MIN_BYTES
        if last or worth:
            self._send_rows(job, DRAFT_KV, layers, start, end)
            job.draft_sent = end

    def _send_hidden(self, job: PrefillJob) -> None:
        """Hidden rows of the chunk, where they cross; a request that drafts without them gets none."""
        assert job.seq is not None
        unwanted = is_weightless(job.request.speculation.drafter)
        for start, rows in take_rows(job.seq):
            skip = max(0, job.first_token - start)
            if skip < rows.shape[0] and not unwanted:
                job.link.hidden_rows(job.ticket, rows[skip:], start + skip)

    def _finish(self, job: PrefillJob, sampled: SampledToken) -> None:
        """The rest of the draft rows, then the seed of decoding. A request that its first token ended has no draft
        state and needs none."""
        seq = job.seq
        assert seq is not None
        self._scheduler.discard(job)
        job.phase = JobPhase.HANDING_OVER
        job.waits_until = time.monotonic() + self._answer_timeout_s
        if seq.finish_reason is None and seq.draft_rows == seq.num_prefill:
            self._send_draft(job, last=True)
        state = handoff_pb2.State(
            first_token_id=sampled.token_id,
            logprobs=logprobs_to_proto(sampled.logprobs) if sampled.logprobs else None,
            finish_reason=finish_reason_to_proto(seq.finish_reason),
        )
        hidden = None
        if seq.draft is not None and seq.finish_reason is None:
            ids = seq.draft.proposal_ids
            state.proposal_depth, state.proposal_width = ids.shape
            state.proposal_ids.extend(ids.flatten().tolist())
            state.proposal_probs.extend(seq.draft.proposal_probs.flatten().tolist())
            hidden = seq.draft.hidden
        job.link.state(job.ticket, state, hidden)

    def handoff_ended(self, ticket: str, failure: str | None, ended: float | None = None) -> None:
        """The hand-off is terminal, since ``ended`` (monotonic clock; None: now): pages return. ``failure``
        None: decode has everything."""
        job = self._jobs.get(ticket)
        if job is None:
            return
        sent, sending_s = job.link.bytes_sent(ticket), job.link.sending_s(ticket)
        exposed = max(0.0, (time.monotonic() if ended is None else ended) - job.computed_at)
        if job.computed_at:
            job.trace.record("exposed transfer", job.computed_at, job.computed_at + exposed, transfer_s=sending_s)
        job.trace.record("hand-off acknowledged" if failure is None else "hand-off failed", reason=failure or "")
        self._release(job)
        if job.given_up:
            return
        if failure is not None:
            job.emit(HandoffFailed(f"hand-off to decode failed: {failure}"))
            return
        counts = inference_pb2.HandoffBytes(
            target_kv=sent.get(TARGET_KV, 0),
            draft_kv=sent.get(DRAFT_KV, 0),
            hidden=sent.get(HIDDEN, 0),
            meta=sent.get(META, 0),
        )
        handed_off = node_pb2.HandedOff(bytes=counts, exposed_s=exposed, transfer_s=sending_s)
        job.emit(node_pb2.PrefillEvent(handed_off=handed_off))

    # -- what the RPCs and timers post -------------------------------------------------------------------------

    def submit(self, job: PrefillJob) -> None:
        """Queue a job. InvalidRequest when its ticket is in use here, Overloaded when the line is full."""
        if job.ticket in self._jobs:
            raise InvalidRequest("ticket", f"{job.ticket} is being handed over already")
        self._scheduler.add(job)
        self._jobs[job.ticket] = job
        self._unchecked = True
        self._admit_waiting()  # now, so that a burst counts against the line only when there is no room

    def give_up(self, job: PrefillJob, error: PacelineError) -> None:
        """Stop computing and tell the RPC why. Pages come back at once, or when the hand-off is terminal if decode
        knows of it. Nothing happens when the job is over or given up already."""
        if job.phase is JobPhase.RELEASED or job.given_up or self._jobs.get(job.ticket) is not job:
            return
        self._scheduler.discard(job)
        job.given_up = True
        job.trace.record("given up", reason=str(error))
        job.emit(error)
        if not job.begun:
            self._release(job)
            return
        job.waits_until = time.monotonic() + self._answer_timeout_s
        job.link.abort(job.ticket, str(error))

    def expire(self) -> None:
        """Apply the deadlines: in line, and of the peer's answer."""
        now = time.monotonic()
        for job in self._scheduler.expire(now):
            self.give_up(job, DeadlineExceeded("no KV pages became free in time on the prefill node"))
        for job in list(self._jobs.values()):
            if job.waits_until <= now:
                job.waits_until = float("inf")
                job.link.lost(f"no answer about {job.ticket} within {self._answer_timeout_s:g} s")

    # -- pages -------------------------------------------------------------------------------------------------

    def _release(self, job: PrefillJob) -> None:
        self._scheduler.discard(job)
        self._jobs.pop(job.ticket, None)
        job.phase = JobPhase.RELEASED
        if job.seq is not None:
            self._runner.release(job.seq)
            job.seq = None
        job.trace.record("pages released")
        self._count_pages()

    def _count_pages(self) -> None:
        self.free_pages = pages_available(self._runner, [job.seq for job in self._jobs.values() if job.seq])

    def _check_when_idle(self) -> None:
        if self._unchecked and not self._jobs:
            self._unchecked = False
            problems = pool_problems(self._runner, [])
            self.integrity = problems[0] if problems else ""
            for problem in problems:
                log.error("KV pool of the prefill node: %s", problem)


def _internal(error: Exception) -> PacelineError:
    return PacelineError(f"prefill failed: {error!r}")
