"""Node servers without a model, for tests of what stands in front of nodes: tokens are a function of (seed, position),
and every way to misbehave is a switch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio

from cluster.routing.router import Router
from cluster.state.prefix_index import PrefixIndex
from cluster.state.registry_types import NodeRecord
from paceline.config import ServeConfig
from paceline.errors import PacelineError
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import TextSource
from paceline.rpc.calls import answering_errors
from paceline.speculation import PREDICTION
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import common_pb2, handoff_pb2, inference_pb2, node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import finish_reason_to_proto, logprobs_to_proto, sequence_digest, sequence_from_proto
from tests.support.byte_text import EOS, VOCAB, ByteDetokenizer, ByteTokenizer

MAX_MODEL_LEN = 128
LETTERS = 26


def token_at(seed: int, position: int) -> int:
    """A lower-case letter."""
    return 97 + (seed * 7 + position * 11 + seed % 5 * position) % LETTERS


def letters(seed: int, prompt_len: int, count: int) -> str:
    """The text that a request gives when nothing stops it."""
    return "".join(chr(token_at(seed, prompt_len + i)) for i in range(count))


@dataclass
class Script:
    """How a node behaves. ``errors`` are raised by its next calls, one each, before anything else."""

    errors: list[PacelineError] = field(default_factory=list)
    round_size: int = 3
    die_after: int | None = None  # tokens of one Decode call, or events of a Prefill call, then `death`, once
    death: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    die_in_prompt: int | None = None  # messages of the prompt's logprobs, then `death`, once
    skip_in_prompt: int | None = None  # leaves this message of the prompt's logprobs out, once
    gate: asyncio.Event | None = None  # waited for before every round, or before the first token
    repeat: bool = False  # sends every token twice
    skip_at: int | None = None  # leaves this index out, once
    cached_tokens: int = 0
    round_pause_s: float = 0.0
    begins: list[node_pb2.PrefillEvent | None] = field(default_factory=list)
    """What the next Prefill calls answer alone, one each, in place of all else; None: nothing at all."""


@dataclass
class FakeNode:
    """What a node saw."""

    record: NodeRecord
    script: Script
    sequences: list[SequenceRequest] = field(default_factory=list)
    tickets: list[str] = field(default_factory=list)
    local: list[bool] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)
    active: int = 0
    cancelled: int = 0
    server: grpc.aio.Server | None = None
    trace_pause_s: float = 0.0
    made: dict[bytes, list[int]] | None = None  # by digest; None: the node is of a version that recalls nothing
    recalls: int = 0

    async def trace(self, request: trace_pb2.TraceRequest) -> trace_pb2.TraceResponse:
        """One event of every sequence of the request."""
        await asyncio.sleep(self.trace_pause_s)
        asked = request.request_id
        told = [s for s in self.sequences if not request.HasField("cache_salt") or s.cache_salt == request.cache_salt]
        seen = [s.request_id for s in told if s.request_id.partition("#")[0] == asked]
        made = [
            trace_pb2.TraceEvent(node=self.record.id, track=self.record.role, sequence=s, name="seen") for s in seen
        ]
        return trace_pb2.TraceResponse(events=made, dropped=len(seen))

    def tokens(self, request: SequenceRequest, first: int) -> list[int]:
        """Output tokens from index ``first`` on, until a stop token or max_tokens."""
        found: list[int] = []
        assert request.params.seed is not None
        for index in range(first, request.params.max_tokens):
            found.append(output_token(request, index))
            if found[-1] in request.params.stop_token_ids:
                break
        return found

    @asynccontextmanager
    async def call(self, context: Any) -> AsyncIterator[None]:
        self.active += 1
        try:
            async with answering_errors(context):
                if self.script.errors:
                    raise self.script.errors.pop(0)
                yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1

    async def tell_of_prompt(self, sequence: SequenceRequest, write: Any, context: Any) -> None:
        """Log-probabilities of the prompt, where they are asked for, two a message."""
        entries, script = prompt_logprobs_of(sequence), self.script
        for sent, start in enumerate(range(0, len(entries), 2)):
            if sent == script.die_in_prompt:
                script.die_in_prompt = None
                await context.abort(script.death, f"{self.record.id} was told to die")
            if sent == script.skip_in_prompt:
                script.skip_in_prompt = None
                continue
            logprobs = [logprobs_to_proto(entry) for entry in entries[start : start + 2]]
            await write(node_pb2.PromptLogprobs(first_position=start + 1, logprobs=logprobs))

    async def maybe_die(self, sent: int, context: Any) -> None:
        if self.script.die_after is not None and sent >= self.script.die_after:
            self.script.die_after = None
            await context.abort(self.script.death, f"{self.record.id} was told to die")


def output_token(request: SequenceRequest, index: int) -> int:
    """The token at ``index`` of the output. The tenant "eos N" makes token N the end of the sequence."""
    if request.cache_salt == f"eos {index}" and not request.params.ignore_eos:
        return EOS
    assert request.params.seed is not None
    return token_at(request.params.seed, len(request.prompt_token_ids) + index)


def reason_after(request: SequenceRequest, index: int, token_id: int) -> FinishReason | None:
    """Whether the token at ``index`` ends the sequence."""
    if token_id in request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if index + 1 >= request.params.max_tokens else None


def logprobs_of(request: SequenceRequest, token_id: int) -> TokenLogprobs | None:
    """The token at -0.5, then its neighbours."""
    top = request.params.top_logprobs
    if top is None:
        return None
    return TokenLogprobs(-0.5, tuple(token_id + i for i in range(top)), tuple(-0.5 - i for i in range(top)))


def prompt_logprobs_of(request: SequenceRequest) -> list[TokenLogprobs]:
    """Token i has -i, then come its neighbours; none where they are not asked for."""
    top = request.params.prompt_logprobs
    if top is None:
        return []
    tokens = enumerate(request.prompt_token_ids[1:], 1)
    return [TokenLogprobs(-i, tuple(t + k for k in range(top)), tuple(-i - k for k in range(top))) for i, t in tokens]


class World:
    """Which tickets are ready to decode."""

    def __init__(self) -> None:
        self.ready: dict[str, asyncio.Event] = {}
        self.issued = 0


class FakeDecode(node_pb2_grpc.DecodeNodeServicer):
    """Reserve, wait for the hand-off, send rounds."""

    def __init__(self, node: FakeNode, world: World) -> None:
        self.node, self.world = node, world

    async def Decode(self, request: node_pb2.DecodeRequest, context: Any) -> None:  # type: ignore[override]
        async with self.node.call(context):
            sequence = sequence_from_proto(request.sequence)
            self.node.sequences.append(sequence)
            if self.node.made is not None:
                self.node.made[sequence_digest(request.sequence)] = self.node.tokens(sequence, 0)
            self.node.local.append(request.local_prefill)
            self.world.issued += 1
            ticket = f"ticket-{self.world.issued}"
            self.node.tickets.append(ticket)
            ready = self.world.ready[ticket] = asyncio.Event()
            reserved = node_pb2.Reserved(ticket=ticket, cached_tokens=self.node.script.cached_tokens)
            await context.write(node_pb2.DecodeEvent(reserved=reserved))
            index = len(sequence.output_token_ids)
            if request.local_prefill:
                write = lambda told: context.write(node_pb2.DecodeEvent(prompt_logprobs=told))  # noqa: E731
                await self.node.tell_of_prompt(sequence, write, context)
                first = output_token(sequence, index)
                await self._send(context, sequence, index, [first], None)
            else:
                await ready.wait()
                first = output_token(sequence, index)
            if reason_after(sequence, index, first) is None:
                await self._rounds(context, sequence, index + 1)
            last = self.node.tokens(sequence, index)[-1]
            reason = FinishReason.STOP if last in sequence.params.stop_token_ids else FinishReason.LENGTH
            finished = node_pb2.Finished(finish_reason=finish_reason_to_proto(reason))
            await context.write(node_pb2.DecodeEvent(finished=finished))

    async def _rounds(self, context: Any, sequence: SequenceRequest, index: int) -> None:
        script, sent = self.node.script, 0
        left = self.node.tokens(sequence, index)
        while left:
            if script.gate is not None:
                await script.gate.wait()
            await asyncio.sleep(script.round_pause_s)
            batch, left = left[: script.round_size], left[script.round_size :]
            if script.skip_at is not None and index <= script.skip_at < index + len(batch):
                script.skip_at, index, batch = None, index + 1, batch[1:]
            drafter = PREDICTION if sequence.speculation.prediction_token_ids else ""
            round_ = common_pb2.Round(num_draft_tokens=4, num_accepted=len(batch) - 1, depth=4, drafter=drafter)
            for _ in range(2 if script.repeat else 1):
                await self._send(context, sequence, index, batch, round_)
            index, sent = index + len(batch), sent + len(batch)
            await self.node.maybe_die(sent, context)

    async def _send(self, context: Any, sequence: SequenceRequest, index: int, batch: list[int], round_: Any) -> None:
        logprobs = [logprobs_of(sequence, token_id) for token_id in batch]
        tokens = node_pb2.Tokens(
            first_index=index,
            token_ids=batch,
            logprobs=[logprobs_to_proto(entry) for entry in logprobs if entry is not None],
            round=round_,
            cached_tokens=self.node.script.cached_tokens,
        )
        await context.write(node_pb2.DecodeEvent(tokens=tokens))

    async def Pair(self, request: handoff_pb2.PairRequest, context: Any) -> handoff_pb2.PairResponse:
        raise NotImplementedError

    async def Handoff(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    async def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusResponse:
        raise NotImplementedError

    async def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceResponse:
        return await self.node.trace(request)

    async def Recall(self, request: node_pb2.RecallRequest, context: Any) -> node_pb2.RecallResponse:
        self.node.recalls += 1
        if self.node.made is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            raise AssertionError("unreachable")
        found = [self.node.made.get(asked.digest, [])[: asked.num_tokens] for asked in request.sequences]
        return node_pb2.RecallResponse(made=[node_pb2.MadeTokens(token_ids=token_ids) for token_ids in found])


class FakePrefill(node_pb2_grpc.PrefillNodeServicer):
    """First token, hand-off."""

    def __init__(self, node: FakeNode, world: World) -> None:
        self.node, self.world = node, world

    async def Prefill(self, request: node_pb2.PrefillRequest, context: Any) -> None:  # type: ignore[override]
        async with self.node.call(context):
            sequence = sequence_from_proto(request.sequence)
            self.node.sequences.append(sequence)
            self.node.tickets.append(request.ticket)
            self.node.alone.append(request.alone)
            if self.node.script.gate is not None:
                await self.node.script.gate.wait()
            if self.node.script.begins:
                if (only := self.node.script.begins.pop(0)) is not None:
                    await context.write(only)
                return
            await self.node.maybe_die(0, context)
            write = lambda told: context.write(node_pb2.PrefillEvent(prompt_logprobs=told))  # noqa: E731
            await self.node.tell_of_prompt(sequence, write, context)
            index = len(sequence.output_token_ids)
            token_id = output_token(sequence, index)
            logprobs = logprobs_of(sequence, token_id)
            first = node_pb2.FirstToken(
                token_id=token_id,
                finish_reason=finish_reason_to_proto(reason_after(sequence, index, token_id)),
                cached_tokens=self.node.script.cached_tokens,
                logprobs=logprobs_to_proto(logprobs) if logprobs else None,
            )
            await context.write(node_pb2.PrefillEvent(first_token=first))
            await self.node.maybe_die(1, context)
            if request.alone:
                await context.write(node_pb2.PrefillEvent(handed_off=node_pb2.HandedOff()))
                return
            self.world.ready[request.ticket].set()
            counts = inference_pb2.HandoffBytes(target_kv=1000, draft_kv=100, hidden=10, meta=1)
            handed_off = node_pb2.HandedOff(bytes=counts, exposed_s=0.001, transfer_s=0.01)
            await context.write(node_pb2.PrefillEvent(handed_off=handed_off))

    async def Connect(self, request: node_pb2.ConnectRequest, context: Any) -> node_pb2.ConnectResponse:
        raise NotImplementedError

    async def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusResponse:
        raise NotImplementedError

    async def Trace(self, request: trace_pb2.TraceRequest, context: Any) -> trace_pb2.TraceResponse:
        return await self.node.trace(request)


class FakeRegistry:
    """The nodes that are alive."""

    stale_for_s = 0.0

    def __init__(self) -> None:
        self.records: dict[str, NodeRecord] = {}

    def nodes(self) -> list[NodeRecord]:
        return [self.records[key] for key in sorted(self.records)]


@dataclass
class Fleet:
    """Scripted nodes behind a router."""

    router: Router
    registry: FakeRegistry
    nodes: dict[str, FakeNode]
    world: World

    async def start(self, node_id: str, generation: int = 1, script: Script | None = None) -> FakeNode:
        """Start (again) a node: "prefill-0", "decode-1"."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = server.add_insecure_port("127.0.0.1:0")
        role = node_id.partition("-")[0]
        record = NodeRecord(node_id, role, generation, f"127.0.0.1:{port}", free_pages=100, total_pages=100)
        node = FakeNode(record, script or Script(), server=server)
        if role == "decode":
            node_pb2_grpc.add_DecodeNodeServicer_to_server(FakeDecode(node, self.world), server)
        else:
            node_pb2_grpc.add_PrefillNodeServicer_to_server(FakePrefill(node, self.world), server)
        await server.start()
        self.nodes[node_id], self.registry.records[node_id] = node, record
        return node

    async def kill(self, node_id: str, *, unregister: bool = True) -> None:
        """End a node's server at once."""
        if unregister:
            del self.registry.records[node_id]
        server = self.nodes[node_id].server
        assert server is not None
        await server.stop(0)

    def set_state(self, node_id: str, state: str) -> None:
        self.registry.records[node_id] = replace(self.registry.records[node_id], state=state)

    async def idle(self, timeout_s: float = 10.0) -> None:
        """Until no node has a call in progress."""
        async with asyncio.timeout(timeout_s):
            while self.router.inflight or any(node.active for node in self.nodes.values()):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet(
    prefill: int = 1,
    decode: int = 1,
    prefixes: PrefixIndex | None = None,
    tokenizer: Tokenizer | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> AsyncIterator[Fleet]:
    """Nodes, started, and a router in front. tokenizer: a real one in place of the bytes."""
    config = ServeConfig.model_validate({"model": "tiny", "lease_ttl_s": 0.4, "num_draft_tokens": 4} | options)
    registry = FakeRegistry()
    router = Router(
        registry,
        tokenizer or ByteTokenizer(),
        config,
        "tiny",
        max_model_len,
        VOCAB,
        detokenizer=None if tokenizer else ByteDetokenizer,
        source=TextSource(bit_exact=True),
        prefixes=prefixes,
    )
    made = Fleet(router, registry, {}, World())
    for role, count in (("prefill", prefill), ("decode", decode)):
        for i in range(count):
            await made.start(f"{role}-{i}")
    try:
        yield made
    finally:
        await router.close()
        for node in made.nodes.values():
            if node.server is not None:
                await node.server.stop(0)
