"""A decode node: takes hand-offs and decodes them, all together, a draft-verify round at a time.

A plain class: it needs neither Ray nor a registry. Threads: the event loop (RPCs, timers), the engine thread, and
for each link a receiver and a sentinel.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import ExitStack, aclosing
from typing import Any

import grpc.aio

from decode_node.engine.engine import DecodeEngine
from decode_node.engine.reservations import HandoffDeadlines, num_slots
from decode_node.engine.scheduler import DecodeLimits
from decode_node.links import HostContext, LinkHost
from decode_node.made import MadeTokens
from decode_node.permits import Permits
from decode_node.service import CALLERS, DecodeService
from decode_node.sink import ReservedPages
from decode_node.stream import EventQueue, Stream
from paceline.config import NodeConfig
from paceline.engine.fingerprint import fingerprint_of
from paceline.engine.model_runner import ModelRunner
from paceline.node.shell import NodeShell, load_model
from paceline.serving.validate import check_request, compiled_grammar
from paceline.spec_decode.sequence import DraftState
from paceline.v1 import handoff_pb2, node_pb2, node_pb2_grpc
from paceline.wire import sequence_from_proto


class DecodeNode:
    """Made, then ``start``ed and ``stop``ped once. ``shell`` is there once it is started."""

    shell: NodeShell

    def __init__(self, config: NodeConfig, node_id: str, runner: ModelRunner | None = None) -> None:
        self._config = config
        self._node_id = node_id
        self._given_runner = runner
        self._made = MadeTokens()

    async def start(self) -> str:
        """Load the model, start engine and server; returns "host:port"."""
        config = self._config
        runner = self._given_runner or await load_model(config, decodes=True)
        self._runner = runner
        fingerprint = fingerprint_of(runner)
        streams: dict[str, Stream] = {}
        sink = ReservedPages(runner, streams, self._ready, self._failed)
        permits = Permits(self._node_id, config, streams)
        self._links = LinkHost(HostContext(self._node_id, fingerprint, config, runner.kv.device, sink, permits))
        limits = DecodeLimits(config.max_running, config.max_waiting, config.chunk_tokens)
        deadlines = HandoffDeadlines(config.reserve_deadline_s, config.handoff_deadline_s)
        self._engine = DecodeEngine(runner, limits, deadlines, streams, self._links)
        self.shell = NodeShell("decode", self._node_id, config, runner, fingerprint, self._engine)
        return await self.shell.start(self._register, self._tick, CALLERS)

    async def stop(self, grace_s: float) -> None:
        """Refuse new sequences, let those in progress finish for ``grace_s`` seconds, then end."""
        await self.shell.end_calls(grace_s)
        await self._links.close()
        await self.shell.end_engine()

    # -- what RPCs call ----------------------------------------------------------------------------------------

    async def decode(self, request: node_pb2.DecodeRequest) -> AsyncGenerator[node_pb2.DecodeEvent, None]:
        """Reserve, then stream what each round commits."""
        loop = self.shell.loop
        with self.shell.call(), ExitStack() as told:
            stream = await self._make_stream(request)
            told.enter_context(self._made.of(request.sequence, stream))
            try:
                await loop.call(lambda: self._engine.submit(stream))
                while True:
                    event = await stream.events.take()
                    if event.HasField("tokens"):
                        stream.num_told = event.tokens.first_index + len(event.tokens.token_ids)
                    yield event
                    if event.HasField("finished"):
                        return
                    if request.tell_every_s and event.HasField("tokens"):
                        await stream.events.gather()
            finally:  # nothing happens when the stream ended by itself
                self._post(stream.ticket, lambda: self._engine.leave(stream))

    def recall(self, request: node_pb2.RecallRequest) -> node_pb2.RecallResponse:
        """The tokens that were made of sequences; also where the node drains."""
        return self._made.recall(request)

    async def pair(self, request: handoff_pb2.PairRequest) -> handoff_pb2.PairResponse:
        """Open a link for a prefill node. PairingRefused when the two do not fit."""
        self.shell.refuse_when_draining()
        return await self._links.pair(request)

    async def handoff(
        self, messages: AsyncIterable[handoff_pb2.HandoffMessage], address: str
    ) -> AsyncGenerator[handoff_pb2.HandoffAck, None]:
        """The control stream of one link. address: of the other side, without its port."""
        async with aclosing(self._links.handoff(messages, address)) as acks:
            async for ack in acks:
                yield ack

    def counts(self) -> dict[str, Any]:
        """What routers show of this node besides its load, by field of the registry's record."""
        counts = self.shell.counts()
        return {
            **counts,
            "missing_drafts": self._engine.missing_drafts,
            "copies": self._runner.drafter.copies(),
            "refused_calls": counts["refused_calls"] + self._links.refused,
            "refused_messages": counts["refused_messages"] + self._links.refused_messages,
        }

    # -- insides -----------------------------------------------------------------------------------------------

    async def _make_stream(self, request: node_pb2.DecodeRequest) -> Stream:
        stream = Stream(
            request=sequence_from_proto(request.sequence),
            local_prefill=request.local_prefill,
            ticket=f"{self._node_id}-{uuid.uuid4().hex}",
            deadline=time.monotonic() + self._config.reserve_deadline_s,
            events=EventQueue(asyncio.get_running_loop(), self.shell.loop.wake, request.tell_every_s),
            local_prefill_up_to=request.local_prefill_up_to,
        )
        check_request(self._runner, stream.request, num_slots(self._runner, stream))
        stream.request.speculation.check_within(self._config)
        stream.grammar = await compiled_grammar(self._runner, stream.request)
        stream.trace = self.shell.recorder.open(stream.request.request_id, "decode", stream.request.cache_salt)
        return stream

    def _ready(self, ticket: str, state: handoff_pb2.State, draft: DraftState | None) -> None:
        self._post(ticket, lambda: self._engine.handoff_ready(ticket, state, draft))

    def _failed(self, ticket: str, reason: str) -> None:
        self._post(ticket, lambda: self._engine.handoff_failed(ticket, reason))

    def _post(self, ticket: str, work: Callable[[], None]) -> None:
        """Run ``work``, which is about one stream, on the engine thread; the stream ends where it raises."""
        self.shell.loop.post(work, lambda error: self._engine.fail(ticket, error))

    def _tick(self) -> None:
        self._links.expire()
        self.shell.loop.post(self._engine.expire)

    def _register(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_DecodeNodeServicer_to_server(DecodeService(self, self.shell), server)
