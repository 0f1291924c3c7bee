"""The prefill engine: chunked prefill, rows handed over while later layers and chunks compute. Everything here runs on
the engine thread; the RPCs and the links post to it.

Whatever ends a job or its hand-off is posted, and so takes effect between two steps: a job that a step computes holds
its pages until that step's end.

Pages of a begun hand-off come back only when it is terminal (acknowledged, or the link is gone and no send reads
them any more): the one edge to that is ``handoff_ended``.
"""

from __future__ import annotations

import logging
import time

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV
from paceline.engine.model_runner import ModelRunner, SampledToken
from paceline.errors import DeadlineExceeded, HandoffFailed, InvalidRequest, Overloaded, PacelineError, failed
from paceline.serving.ledger import PageLedger
from paceline.tracing import NO_TRACE, Trace
from paceline.v1 import inference_pb2, node_pb2
from paceline.wire import finish_reason_to_proto, logprobs_to_proto, prompt_logprobs_to_proto
from prefill_node.engine.scheduler import PrefillLimits, PrefillScheduler
from prefill_node.engine.sends import Sends
from prefill_node.job import JobPhase, PrefillJob

log = logging.getLogger(__name__)


class PrefillEngine:
    """Owns the runner and every job. ``answer_timeout_s``: longest wait for the peer's answer once all is queued."""

    def __init__(self, runner: ModelRunner, limits: PrefillLimits, answer_timeout_s: float) -> None:
        self._runner = runner
        self._scheduler: PrefillScheduler[PrefillJob] = PrefillScheduler(limits)
        self._sends = Sends(runner)
        self._answer_timeout_s = answer_timeout_s
        self._jobs: dict[str, PrefillJob] = {}  # by ticket, until RELEASED
        self.pages = PageLedger(runner, "prefill")

    # -- what it tells, from any thread ------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Jobs that have their pages; at least 0, as the engine's thread may go on between the two counts."""
        waiting = self.num_waiting
        return max(self.num_held - waiting, 0)

    @property
    def num_waiting(self) -> int:
        """Jobs in line."""
        return self._scheduler.num_waiting

    @property
    def num_held(self) -> int:
        """Jobs whose pages are not back yet, those in line counted."""
        return len(self._jobs)

    def trace_of(self, ticket: str) -> Trace:
        """Where a job that holds pages is recorded."""
        job = self._jobs.get(ticket)
        return NO_TRACE if job is None else job.trace

    # -- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit, run one forward over the next chunks, hand over what it made. False when there was nothing to do."""
        self._admit()
        step = self._scheduler.next_chunks()
        if not step:
            if not self._jobs:
                self.pages.check()
            return False
        self._sends.cached_rows(step)
        began = time.monotonic()
        try:
            results = self._runner.prefill([chunk for _, chunk in step], self._sends.after_layer_of(step))
        except Exception as error:
            log.exception("prefill step of %s failed", [job.request.request_id for job, _ in step])
            for job, _ in step:
                self.give_up(job, failed("prefill", error))
            return True
        ended = time.monotonic()
        for (job, chunk), sampled in zip(step, results, strict=True):
            job.trace.record("chunk", began, ended, first_token=chunk.start, end_token=chunk.end, batch=len(step))
            self._postprocess(job, sampled)
        return True

    def _admit(self) -> None:
        for job, error in self._scheduler.admit(self._start):
            log.error("starting %s failed", job.request.request_id, exc_info=error)
            self.give_up(job, failed("prefill", error))

    def _start(self, job: PrefillJob) -> bool:
        """Take pages for the whole prompt; False when the pool lacks them now."""
        if job.seq is None:
            # Cached rows have KV but no hidden rows: of those that are to cross, all are computed.
            most = job.first_token if self._runner.handoff.row_width else None
            job.seq = self._runner.new_sequence(job.request, most, grammar=job.grammar)
        try:
            self._runner.take_pages(job.seq, job.seq.num_prefill + 1)
        except Overloaded:
            return False
        self._count_pages()
        job.phase = JobPhase.COMPUTING
        job.trace.record("queued", job.queued_at, time.monotonic(), cached_tokens=job.seq.cached_tokens)
        return True

    def _postprocess(self, job: PrefillJob, sampled: SampledToken | None) -> None:
        """``sampled``: the first token, after a prompt's last chunk."""
        assert job.seq is not None
        for message in prompt_logprobs_to_proto(*job.seq.take_prompt_logprobs()):
            job.emit(node_pb2.PrefillEvent(prompt_logprobs=message))
        if sampled is None:
            self._sends.chunk(job)
            return
        if job.seq is not None and job.seq.failure is not None:
            self.give_up(job, job.seq.failure)
            return
        job.computed_at = time.monotonic()
        job.trace.record("first token", job.computed_at)
        job.emit(_first_token(job, sampled))  # time to first token does not wait for the hand-off's end
        self._scheduler.discard(job)
        job.phase = JobPhase.HANDING_OVER
        job.waits_until = time.monotonic() + self._answer_timeout_s
        self._sends.end(job, sampled)

    # -- what RPCs, links and timers post ----------------------------------------------------------------------

    def submit(self, job: PrefillJob) -> None:
        """Queue a job. InvalidRequest when its ticket is in use here, Overloaded when the line is full."""
        if job.ticket in self._jobs:
            raise InvalidRequest("ticket", f"{job.ticket} is being handed over already")
        self._scheduler.add(job)
        self._jobs[job.ticket] = job
        self._admit()  # now, so that a burst counts against the line only when there is no room

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

    def handoff_ended(self, ticket: str, failure: str | None, ended: float) -> None:
        """The hand-off is terminal since ``ended`` (monotonic clock): pages return. ``failure`` None: decode has
        everything."""
        job = self._jobs.get(ticket)
        if job is None:
            return
        exposed_s = 0.0  # the transfer that was not hidden behind the prompt
        if job.computed_at:
            exposed_s = max(0.0, ended - job.computed_at)
            sending_s = job.link.sending_s(ticket)
            job.trace.record("exposed transfer", job.computed_at, job.computed_at + exposed_s, transfer_s=sending_s)
        job.trace.record("hand-off acknowledged" if failure is None else "hand-off failed", reason=failure or "")
        self._release(job)
        if job.given_up:
            return
        if failure is None:
            job.emit(_handed_off(job, exposed_s))
        else:
            job.emit(HandoffFailed(f"hand-off to decode failed: {failure}"))

    def fail(self, ticket: str, error: Exception) -> None:
        """What was posted about a job whose hand-off is over raised: end it, and give its pages back."""
        job = self._jobs.get(ticket)
        if job is not None:
            self._release(job)
            job.emit(failed("prefill", error))

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
        self.pages.count(job.seq for job in self._jobs.values() if job.seq is not None)


def _first_token(job: PrefillJob, sampled: SampledToken) -> node_pb2.PrefillEvent:
    assert job.seq is not None
    token = node_pb2.FirstToken(
        token_id=sampled.token_id,
        logprobs=logprobs_to_proto(sampled.logprobs) if sampled.logprobs else None,
        finish_reason=finish_reason_to_proto(job.seq.finish_reason),
        cached_tokens=job.seq.cached_tokens,
    )
    return node_pb2.PrefillEvent(first_token=token)


def _handed_off(job: PrefillJob, exposed_s: float) -> node_pb2.PrefillEvent:
    sent = job.link.bytes_sent(job.ticket)
    counts = inference_pb2.HandoffBytes(
        target_kv=sent.get(TARGET_KV, 0),
        draft_kv=sent.get(DRAFT_KV, 0),
        hidden=sent.get(HIDDEN, 0),
        meta=sent.get(META, 0),
    )
    handed_off = node_pb2.HandedOff(bytes=counts, exposed_s=exposed_s, transfer_s=job.link.sending_s(job.ticket))
    return node_pb2.PrefillEvent(handed_off=handed_off)
