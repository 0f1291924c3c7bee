"""What of a job is sent to its decode node, and when. Everything here runs on the engine thread.

Rows leave at the layer that completes a group (groups.py), in the midst of a step. Hidden rows, draft rows and the seed
of decoding, which are behind the last layer, leave after it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV, ByteClass, RowBlock
from paceline.engine.model_runner import ModelRunner, PrefillChunk, SampledToken
from paceline.kvcache.layout import LayerOwner
from paceline.models.base import AfterLayer
from paceline.spec_decode.drafters.row_exporter import take_rows
from paceline.speculation import is_weightless
from paceline.v1 import handoff_pb2
from paceline.wire import finish_reason_to_proto, logprobs_to_proto
from prefill_node.groups import MIN_BYTES
from prefill_node.job import PrefillJob

Step = Seq[tuple[PrefillJob, PrefillChunk]]


class Sends:
    """Gives the rows of jobs to their links. Each job is begun with its first rows."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._target_layers = runner.kv.layout.layer_range(LayerOwner.TARGET)
        self._draft_layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)

    def cached_rows(self, step: Step) -> None:
        """Before a job's first chunk: the rows that the prefix cache had and decode lacks."""
        for job, chunk in step:
            if not job.begun and job.first_token < chunk.start:
                self._begin(job)
                self._send_rows(job, TARGET_KV, self._target_layers, job.first_token, chunk.start)
                self._send_draft(job, last=False)

    def after_layer_of(self, step: Step) -> AfterLayer:
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

    def chunk(self, job: PrefillJob) -> None:
        """After a chunk that is not the last one: its hidden rows, and draft rows if they are worth a message."""
        self._begin(job)
        self._send_hidden(job)
        self._send_draft(job, last=False)

    def end(self, job: PrefillJob, sampled: SampledToken) -> None:
        """After the last chunk: its hidden rows, the rest of the draft rows, then the seed of decoding. A request that
        its first token ended has no draft state and needs none."""
        seq = job.seq
        assert seq is not None
        self._begin(job)
        self._send_hidden(job)
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

    def _begin(self, job: PrefillJob) -> None:
        if not job.begun:
            assert job.seq is not None
            job.begun = True
            job.trace.record("hand-off begin", first_token=job.first_token, end_token=job.seq.num_prefill)
            job.link.begin(job.ticket, range(job.first_token, job.seq.num_prefill), job.grant)

    def _send_group(self, job: PrefillJob, layers: range, start: int, end: int) -> None:
        self._begin(job)
        self._send_rows(job, TARGET_KV, layers, start, end)

    @staticmethod
    def _send_rows(job: PrefillJob, byte_class: ByteClass, layers: range, start: int, end: int) -> None:
        if job.seq is not None and start < end and len(layers):
            block = RowBlock(byte_class, layers, range(start, end))
            job.link.rows(job.ticket, block, job.seq.table.slots[start:end])

    def _send_draft(self, job: PrefillJob, *, last: bool) -> None:
        """Draft rows that are settled; before the last ones only as many as are worth a message."""
        seq = job.seq
        if seq is None or _weightless(job):
            return
        start, end = max(job.first_token, job.draft_sent), self._runner.settled_draft_rows(seq)
        worth = (end - start) * self._runner.kv.layout.token_bytes(LayerOwner.DRAFT) >= MIN_BYTES
        if last or worth:
            self._send_rows(job, DRAFT_KV, self._draft_layers, start, end)
            job.draft_sent = end

    @staticmethod
    def _send_hidden(job: PrefillJob) -> None:
        """Hidden rows of the chunk, where they cross; a request that drafts without them gets none."""
        assert job.seq is not None
        unwanted = _weightless(job)
        for start, rows in take_rows(job.seq):
            skip = max(0, job.first_token - start)
            if skip < rows.shape[0] and not unwanted:
                job.link.hidden_rows(job.ticket, rows[skip:], start + skip)


def _weightless(job: PrefillJob) -> bool:
    """The request chose a drafter that has no rows."""
    return is_weightless(job.request.speculation.drafter)
