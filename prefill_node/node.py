"""A prefill node: computes prompts, answers first tokens, hands everything over to decode nodes.

A plain class: it needs neither Ray nor a registry. Threads: the event loop (RPCs, timers), the engine thread, and
for each link a feeder, a sender and a sentinel.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from kv_transfer.handoff.state import described
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest, NodeUnavailable, PacelineError, RequestCancelled
from paceline.kvcache.prefix import PrefixCache
from paceline.rpc.calls import end_server, start_server
from paceline.serving.loop import EngineLoop, every, notify
from paceline.serving.validate import check_request
from paceline.tracing import Recorder
from paceline.v1 import handoff_pb2, inference_pb2, node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import sequence_from_proto, trace_to_proto
from prefill_node.engine import PrefillEngine
from prefill_node.job import PrefillJob
from prefill_node.links import LinkContext, LinkPool
from prefill_node.scheduler import PrefillLimits
from prefill_node.service import PrefillService

log = logging.getLogger(__name__)

TICK_S = 0.1  # of the deadlines
STOP_TIMEOUT_S = 10.0  # for the engine thread


class PrefillNode:
    """Made, then ``start``ed and ``stop``ped once."""

    def __init__(self, config: NodeConfig, node_id: str, runner: ModelRunner | None = None) -> None:
        self._config = config
        self._node_id = node_id
        self._given_runner = runner
        self._address = ""
        self._draining = False
        self._active = 0  # Prefill RPCs in progress
        self._recorder = Recorder(config.trace_requests)

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> str:
        """Load the model, start engine and server; returns "host:port"."""
        config = self._config
        runner = self._given_runner
        if runner is None:
            runner = await asyncio.to_thread(_build, config)
        self._runner = runner
        self._fingerprint = runner.fingerprint()
        limits = PrefillLimits(config.prefill_chunk_tokens, config.max_running, config.max_waiting)
        # Decode answers at its own hand-off deadline at the latest; one message may be late by its timeout.
        answer_timeout_s = config.handoff_deadline_s + 2 * config.transfer_timeout_s
        self._engine = PrefillEngine(runner, limits, answer_timeout_s)
        self._loop = EngineLoop(f"engine-{self._node_id}", self._engine.step)
        self._loop.start()
        sent = self._sent if config.trace_requests else None
        self._links = LinkPool(LinkContext(self._node_id, self._fingerprint, config, runner.kv, self._ended, sent))
        self._timer = asyncio.create_task(every(TICK_S, lambda: self._loop.post(self._engine.expire)))
        max_rpcs = 4 * (config.max_waiting + config.max_running) + 64
        self._server, self._address = await start_server(self._register, config.host, max_rpcs)
        log.info("prefill node %s serves at %s", self._node_id, self._address)
        return self._address

    async def stop(self, grace_s: float) -> None:
        """Refuse new prompts, let those in progress finish for ``grace_s`` seconds, then end."""
        self._draining = True
        await end_server(self._server, lambda: self._active, grace_s)
        self._timer.cancel()
        await self._links.close()
        await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S)

    def alive(self) -> bool:
        """The engine thread runs and is not stuck."""
        return self._loop.alive()

    # -- what RPCs call ----------------------------------------------------------------------------------------

    async def prefill(self, request: node_pb2.PrefillRequest) -> AsyncGenerator[node_pb2.PrefillEvent, None]:
        """Compute a prompt: its first token as soon as it is sampled, then the end of the hand-off."""
        self._active += 1
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._active -= 1

    async def connect(self, decode_address: str) -> node_pb2.ConnectResponse:
        """Pair with a decode node ahead of the first request."""
        link = await self._links.get(decode_address)
        return node_pb2.ConnectResponse(link_id=link.link_id, decode_node_id=link.decode_node_id)

    def load(self) -> inference_pb2.NodeInfo:
        """How busy the node is."""
        engine = self._engine
        waiting = engine.num_waiting
        return inference_pb2.NodeInfo(
            id=self._node_id,
            role="prefill",
            address=self._address,
            running=max(engine.num_held - waiting, 0),  # the engine's thread goes on between the two counts
            waiting=waiting,
            free_pages=engine.free_pages,
            total_pages=self._runner.allocator.num_pages,
        )

    def counts(self) -> dict[str, Any]:
        """What routers show of this node besides its load: nothing."""
        return {}

    def status(self) -> node_pb2.StatusResponse:
        """Load and identity."""
        return node_pb2.StatusResponse(
            node=self.load(),
            fingerprint=self._fingerprint,
            bit_exact=self._runner.bit_exact,
            draining=self._draining,
            held=self._engine.num_held,
            integrity=self._engine.integrity,
            max_model_len=self._runner.max_model_len,
            vocab_size=self._runner.vocab_size,
        )

    def trace(self, request_id: str) -> trace_pb2.TraceResponse:
        """When what happened here to one of the latest requests."""
        return trace_to_proto(self._recorder.read(request_id, self._node_id))

    def prefix_cache(self) -> PrefixCache | None:
        """What routers are told of, once started; None: nothing is cached."""
        return self._runner.prefix

    def fingerprint_digest(self) -> str:
        """Equal for two nodes exactly when they can pair."""
        return hashlib.sha256(self._fingerprint.SerializeToString(deterministic=True)).hexdigest()

    # -- insides -----------------------------------------------------------------------------------------------

    async def _events(self, request: node_pb2.PrefillRequest) -> AsyncGenerator[node_pb2.PrefillEvent, None]:
        if self._draining:
            raise NodeUnavailable(f"prefill node {self._node_id} is draining")
        job, events = await self._make_job(request)
        try:
            await self._loop.call(lambda: self._engine.submit(job))
            while True:
                event = await events.get()
                if isinstance(event, PacelineError):
                    raise event
                yield event
                if event.HasField("handed_off"):
                    return
        finally:  # nothing happens when the job is over
            self._loop.post(lambda: self._engine.give_up(job, RequestCancelled("the caller went away")))

    async def _make_job(
        self, request: node_pb2.PrefillRequest
    ) -> tuple[PrefillJob, asyncio.Queue[node_pb2.PrefillEvent | PacelineError]]:
        sequence = sequence_from_proto(request.sequence)
        num_prefill = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        check_request(self._runner, sequence, num_prefill + 1)
        if not request.ticket:
            raise InvalidRequest("ticket", "must not be empty")
        if request.decode_cached_tokens >= num_prefill:
            raise InvalidRequest("decode_cached_tokens", f"must be below the {num_prefill} tokens of the prompt")
        link = await self._links.get(request.decode_address)
        # Bounded: a first token, then HandedOff or an error.
        events: asyncio.Queue[node_pb2.PrefillEvent | PacelineError] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        job = PrefillJob(
            request=sequence,
            ticket=request.ticket,
            first_token=request.decode_cached_tokens,
            link=link,
            deadline=time.monotonic() + self._config.reserve_deadline_s,
            emit=lambda event: notify(loop, events.put_nowait, event),
            trace=self._recorder.open(sequence.request_id, "prefill"),
        )
        return job, events

    def _ended(self, ticket: str, failure: str | None) -> None:
        ended = time.monotonic()  # the engine may be in the midst of a step
        self._loop.post(lambda: self._engine.handoff_ended(ticket, failure, ended))

    def _sent(self, message: handoff_pb2.HandoffMessage, began: float) -> None:
        """A sender's thread has sent a message and its bytes."""
        name = f"{message.WhichOneof('body')} sent"
        trace = self._engine.trace_of(message.ticket).on("send")
        trace.record(name, began, time.monotonic(), **described(message))

    def _register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_PrefillNodeServicer_to_server(PrefillService(self), server)


def _build(config: NodeConfig) -> ModelRunner:
    from paceline.assembly.build import build_runner  # heavy: loads the model

    return build_runner(config, decodes=False)
