"""A decode node: takes hand-offs and decodes them, all together, a draft-verify round at a time.

A plain class: it needs neither Ray nor a registry. Threads: the event loop (RPCs, timers), the engine thread, and
for each link a receiver and a sentinel.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from typing import Any

import grpc.aio

from decode_node.engine import DecodeEngine, HandoffDeadlines, num_slots
from decode_node.links import HostContext, LinkHost
from decode_node.scheduler import DecodeLimits
from decode_node.service import DecodeService
from decode_node.sink import ReservedPages
from decode_node.stream import EventQueue, Stream
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import NodeUnavailable
from paceline.kvcache.prefix import PrefixCache
from paceline.rpc.calls import end_server, start_server
from paceline.serving.loop import EngineLoop, every
from paceline.serving.validate import check_request
from paceline.spec_decode.sequence import DraftState
from paceline.tracing import Recorder
from paceline.v1 import handoff_pb2, inference_pb2, node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import sequence_from_proto, trace_to_proto

log = logging.getLogger(__name__)

TICK_S = 0.1  # of the deadlines
STOP_TIMEOUT_S = 10.0  # for the engine thread


class DecodeNode:
    """Made, then ``start``ed and ``stop``ped once."""

    def __init__(self, config: NodeConfig, node_id: str, runner: ModelRunner | None = None) -> None:
        self._config = config
        self._node_id = node_id
        self._given_runner = runner
        self._address = ""
        self._draining = False
        self._active = 0  # Decode RPCs in progress
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
        limits = DecodeLimits(config.max_running, config.max_waiting, config.prefill_chunk_tokens)
        deadlines = HandoffDeadlines(config.reserve_deadline_s, config.handoff_deadline_s)
        self._engine = DecodeEngine(runner, limits, deadlines)
        self._loop = EngineLoop(f"engine-{self._node_id}", self._engine.step)
        sink = ReservedPages(runner, self._engine.streams, self._ready, self._failed)
        context = HostContext(self._node_id, self._fingerprint, config, runner.kv.device, sink)
        self._links = await LinkHost.start(context)
        self._engine.bind(self._links)
        self._loop.start()
        self._timer = asyncio.create_task(every(TICK_S, self._tick))
        max_rpcs = 4 * (config.max_waiting + config.max_running) + 64
        self._server, self._address = await start_server(self._register, config.host, max_rpcs)
        log.info("decode node %s serves at %s", self._node_id, self._address)
        return self._address

    async def stop(self, grace_s: float) -> None:
        """Refuse new sequences, let those in progress finish for ``grace_s`` seconds, then end."""
        self._draining = True
        await end_server(self._server, lambda: self._active, grace_s)
        self._timer.cancel()
        await self._links.close()
        await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S)

    def alive(self) -> bool:
        """The engine thread runs and is not stuck."""
        return self._loop.alive()

    # -- what RPCs call ----------------------------------------------------------------------------------------

    async def decode(self, request: node_pb2.DecodeRequest) -> AsyncGenerator[node_pb2.DecodeEvent, None]:
        """Reserve, then stream what each round commits."""
        self._active += 1
        try:
            async with aclosing(self._events(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._active -= 1

    async def pair(self, request: handoff_pb2.PairRequest) -> handoff_pb2.PairResponse:
        """Open a link for a prefill node. PairingRefused when the two do not fit."""
        if self._draining:
            raise NodeUnavailable(f"decode node {self._node_id} is draining")
        return await self._links.pair(request)

    async def handoff(
        self, messages: AsyncIterable[handoff_pb2.HandoffMessage]
    ) -> AsyncGenerator[handoff_pb2.HandoffAck, None]:
        """The control stream of one link."""
        async with aclosing(self._links.handoff(messages)) as acks:
            async for ack in acks:
                yield ack

    def load(self) -> inference_pb2.NodeInfo:
        """How busy the node is."""
        engine = self._engine
        return inference_pb2.NodeInfo(
            id=self._node_id,
            role="decode",
            address=self._address,
            running=engine.num_running,
            waiting=engine.num_waiting,
            free_pages=engine.free_pages,
            total_pages=self._runner.allocator.num_pages,
        )

    def counts(self) -> dict[str, Any]:
        """What routers show of this node besides its load, by field of the registry's record."""
        return {"missing_drafts": self._engine.missing_drafts, "copies": self._runner.drafter.copies()}

    def status(self) -> node_pb2.StatusResponse:
        """Load and identity."""
        return node_pb2.StatusResponse(
            node=self.load(),
            fingerprint=self._fingerprint,
            bit_exact=self._runner.bit_exact,
            draining=self._draining,
            held=len(self._engine.streams),
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

    async def _events(self, request: node_pb2.DecodeRequest) -> AsyncGenerator[node_pb2.DecodeEvent, None]:
        if self._draining:
            raise NodeUnavailable(f"decode node {self._node_id} is draining")
        stream = Stream(
            request=sequence_from_proto(request.sequence),
            local_prefill=request.local_prefill,
            ticket=f"{self._node_id}-{uuid.uuid4().hex}",
            deadline=time.monotonic() + self._config.reserve_deadline_s,
            events=EventQueue(asyncio.get_running_loop(), self._loop.wake),
            local_prefill_up_to=request.local_prefill_up_to,
        )
        check_request(self._runner, stream.request, num_slots(self._runner, stream))
        stream.trace = self._recorder.open(stream.request.request_id, "decode")
        try:
            await self._loop.call(lambda: self._engine.submit(stream))
            while True:
                event = await stream.events.take()
                yield event
                if event.HasField("finished"):
                    return
        finally:  # nothing happens when the stream ended by itself
            self._loop.post(lambda: self._engine.leave(stream))

    def _ready(self, ticket: str, state: handoff_pb2.State, draft: DraftState | None) -> None:
        self._loop.post(lambda: self._engine.handoff_ready(ticket, state, draft))

    def _failed(self, ticket: str, reason: str) -> None:
        self._loop.post(lambda: self._engine.handoff_failed(ticket, reason))

    def _tick(self) -> None:
        self._links.expire()
        self._loop.post(self._engine.expire)

    def _register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeService(self), server)


def _build(config: NodeConfig) -> ModelRunner:
    from paceline.assembly.build import build_runner  # heavy: loads the model

    return build_runner(config)
