"""A prefill node: computes prompts, answers first tokens, hands everything over to decode nodes.

A plain class: it needs neither Ray nor a registry. Threads: the event loop (RPCs, timers), the engine thread, and
for each link a feeder, a sender and a sentinel.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from kv_transfer.handoff.block import described
from paceline.config import NodeConfig
from paceline.engine.fingerprint import fingerprint_of
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest, PacelineError, RequestCancelled
from paceline.node.shell import NodeShell, load_model
from paceline.serving.loop import notify
from paceline.serving.validate import check_request, compiled_grammar
from paceline.v1 import handoff_pb2, node_pb2, node_pb2_grpc
from paceline.wire import sequence_from_proto
from prefill_node.engine.engine import PrefillEngine
from prefill_node.engine.scheduler import PrefillLimits
from prefill_node.job import PrefillJob
from prefill_node.links import LinkContext, LinkPool
from prefill_node.nowhere import Nowhere
from prefill_node.service import CALLERS, PrefillService

Events = asyncio.Queue[node_pb2.PrefillEvent | PacelineError]


class PrefillNode:
    """Made, then ``start``ed and ``stop``ped once. ``shell`` is there once it is started."""

    shell: NodeShell

    def __init__(self, config: NodeConfig, node_id: str, runner: ModelRunner | None = None) -> None:
        self._config = config
        self._node_id = node_id
        self._given_runner = runner

    async def start(self) -> str:
        """Load the model, start engine and server; returns "host:port"."""
        config = self._config
        runner = self._given_runner or await load_model(config, decodes=False)
        self._runner = runner
        fingerprint = fingerprint_of(runner)
        limits = PrefillLimits(config.chunk_tokens, config.max_running, config.max_waiting)
        # Decode answers at its own hand-off deadline at the latest; one message may be late by its timeout.
        answer_timeout_s = config.handoff_deadline_s + 2 * config.transfer_timeout_s
        self._engine = PrefillEngine(runner, limits, answer_timeout_s)
        self.shell = NodeShell("prefill", self._node_id, config, runner, fingerprint, self._engine)
        sent = self._sent if config.trace_requests else None
        self._links = LinkPool(
            LinkContext(self._node_id, fingerprint, config, runner.kv, self.shell.identity, self._ended, sent)
        )
        return await self.shell.start(self._register, lambda: self.shell.loop.post(self._engine.expire), CALLERS)

    async def stop(self, grace_s: float) -> None:
        """Refuse new prompts, let those in progress finish for ``grace_s`` seconds, then end."""
        await self.shell.end_calls(grace_s)
        await self._links.close()
        await self.shell.end_engine()

    # -- what RPCs call ----------------------------------------------------------------------------------------

    async def prefill(self, request: node_pb2.PrefillRequest) -> AsyncGenerator[node_pb2.PrefillEvent, None]:
        """Compute a prompt: its first token as soon as it is sampled, then the end of the hand-off."""
        loop = self.shell.loop
        with self.shell.call():
            job, events = await self._make_job(request)
            try:
                await loop.call(lambda: self._engine.submit(job))
                while True:
                    event = await events.get()
                    if isinstance(event, PacelineError):
                        raise event
                    yield event
                    if event.HasField("handed_off"):
                        return
            finally:  # nothing happens when the job is over
                loop.post(lambda: self._engine.give_up(job, RequestCancelled("the caller went away")))

    async def connect(self, decode_address: str) -> node_pb2.ConnectResponse:
        """Pair with a decode node ahead of the first request."""
        link = await self._links.get(decode_address)
        return node_pb2.ConnectResponse(link_id=link.link_id, decode_node_id=link.decode_node_id)

    def counts(self) -> dict[str, Any]:
        """What routers show of this node besides its load, by field of the registry's record."""
        return self.shell.counts()

    # -- insides -----------------------------------------------------------------------------------------------

    async def _make_job(self, request: node_pb2.PrefillRequest) -> tuple[PrefillJob, Events]:
        sequence = sequence_from_proto(request.sequence)
        num_prefill = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        check_request(self._runner, sequence, num_prefill + 1)
        if not (request.ticket or request.alone):
            raise InvalidRequest("ticket", "must not be empty")
        if request.decode_cached_tokens >= num_prefill:
            raise InvalidRequest("decode_cached_tokens", f"must be below the {num_prefill} tokens of the prompt")
        grammar = await compiled_grammar(self._runner, sequence)
        link = Nowhere(self._ended) if request.alone else await self._links.get(request.decode_address)
        events: Events = asyncio.Queue()  # bounded: a prompt's log-probabilities, a first token, HandedOff or an error
        loop = asyncio.get_running_loop()
        job = PrefillJob(
            request=sequence,
            ticket=f"{self._node_id}-{uuid.uuid4().hex}" if request.alone else request.ticket,
            first_token=0 if request.alone else request.decode_cached_tokens,
            link=link,
            grant=request.grant,
            deadline=time.monotonic() + self._config.reserve_deadline_s,
            emit=lambda event: notify(loop, events.put_nowait, event),
            grammar=grammar,
            trace=self.shell.recorder.open(sequence.request_id, "prefill", sequence.cache_salt),
        )
        return job, events

    def _ended(self, ticket: str, failure: str | None) -> None:
        ended = time.monotonic()  # the engine may be in the midst of a step
        self.shell.loop.post(
            lambda: self._engine.handoff_ended(ticket, failure, ended),
            lambda error: self._engine.fail(ticket, error),
        )

    def _sent(self, message: handoff_pb2.HandoffMessage, began: float) -> None:
        """A sender's thread has sent a message and its bytes."""
        name = f"{message.WhichOneof('body')} sent"
        trace = self._engine.trace_of(message.ticket).on("send")
        trace.record(name, began, time.monotonic(), **described(message))

    def _register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_PrefillNodeServicer_to_server(PrefillService(self, self.shell), server)
