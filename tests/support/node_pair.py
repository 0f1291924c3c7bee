"""A prefill and a decode node in one process, over loopback gRPC and gloo, driven as the router drives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from decode_node.node import DecodeNode
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.request import SequenceRequest
from paceline.v1 import inference_pb2, node_pb2, node_pb2_grpc
from paceline.wire import sequence_to_proto
from prefill_node.node import PrefillNode
from tests.support.exactness import LogitBits, Outcome

ANSWER_TIMEOUT_S = 240.0


@dataclass
class Answer:
    """One request's events, in order."""

    token_ids: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    handed_off: node_pb2.HandedOff | None = None


@dataclass
class Pair:
    """Both nodes, and their runners."""

    prefill: ModelRunner
    decode: ModelRunner
    prefill_node: PrefillNode
    decode_node: DecodeNode
    prefill_stub: node_pb2_grpc.PrefillNodeAsyncStub
    decode_stub: node_pb2_grpc.DecodeNodeAsyncStub
    decode_address: str

    async def generate(self, request: SequenceRequest, local_prefill: bool = False) -> Answer:
        """Decode reserves, prefill computes and hands over, both streams are read."""
        answer = Answer()
        sequence = sequence_to_proto(request)
        call = self.decode_stub.Decode(
            node_pb2.DecodeRequest(sequence=sequence, local_prefill=local_prefill), timeout=ANSWER_TIMEOUT_S
        )
        prefilling: asyncio.Task[None] | None = None
        async for event in call:
            if event.HasField("reserved") and not local_prefill:
                prefilling = asyncio.create_task(self._prefill(sequence, event.reserved, answer))
            elif event.HasField("tokens"):
                if prefilling is not None and not answer.token_ids:
                    await _first_token(prefilling, answer)
                assert event.tokens.first_index == len(answer.token_ids)
                answer.token_ids += event.tokens.token_ids
                if event.tokens.HasField("round"):
                    answer.accepted_per_round.append(event.tokens.round.num_accepted)
        if prefilling is not None:
            await prefilling
        return answer

    async def _prefill(self, sequence: node_pb2.SequenceRequest, reserved: node_pb2.Reserved, answer: Answer) -> None:
        call = self.prefill_stub.Prefill(
            node_pb2.PrefillRequest(
                sequence=sequence,
                ticket=reserved.ticket,
                decode_address=self.decode_address,
                decode_cached_tokens=reserved.cached_tokens,
            ),
            timeout=ANSWER_TIMEOUT_S,
        )
        async for event in call:
            if event.HasField("first_token"):
                answer.token_ids.append(event.first_token.token_id)
            else:
                answer.handed_off = event.handed_off

    async def run(self, requests: Sequence[SequenceRequest], concurrent: int) -> list[tuple[Outcome, Answer]]:
        """Outcomes with logit bits of whichever node computed them."""
        bits = [LogitBits(runner) for runner in (self.prefill, self.decode)]
        limit = asyncio.Semaphore(concurrent)

        async def one(request: SequenceRequest) -> Answer:
            async with limit:
                return await self.generate(request)

        answers = await asyncio.gather(*(one(r) for r in requests))
        bits[0].seen.update(bits[1].seen)
        outcomes = [
            Outcome(tuple(a.token_ids), bits[0].of(r, len(a.token_ids)), tuple(a.accepted_per_round))
            for r, a in zip(requests, answers, strict=True)
        ]
        return list(zip(outcomes, answers, strict=True))

    async def all_released(self, timeout_s: float = 10.0) -> None:
        """Until both nodes hold nothing; then the books must be whole."""
        async with asyncio.timeout(timeout_s):
            while any(node.shell.status().held for node in (self.prefill_node, self.decode_node)):
                await asyncio.sleep(0.02)
            while any(load.running for load in self._loads()):
                await asyncio.sleep(0.02)
            # A node forgets a request before its pages are back; what it tells of free pages comes after.
            while any(load.free_pages < load.total_pages for load in self._loads()):
                await asyncio.sleep(0.02)
        for runner in (self.prefill, self.decode):
            cached = runner.prefix.num_pages if runner.prefix is not None else 0
            assert runner.allocator.check_integrity() == []
            assert runner.allocator.num_free + cached == runner.allocator.num_pages

    def _loads(self) -> list[inference_pb2.NodeInfo]:
        return [node.shell.load() for node in (self.prefill_node, self.decode_node)]


async def _first_token(prefilling: asyncio.Task[None], answer: Answer) -> None:
    while not answer.token_ids and not prefilling.done():
        await asyncio.sleep(0.001)
    if prefilling.done():
        prefilling.result()


@asynccontextmanager
async def pair(config: NodeConfig, prefill: ModelRunner, decode: ModelRunner) -> AsyncIterator[Pair]:
    """Both nodes, started; stopped at the end."""
    prefill_node = PrefillNode(config, "prefill-0", prefill)
    decode_node = DecodeNode(config, "decode-0", decode)
    addresses = await prefill_node.start(), await decode_node.start()
    try:
        async with (
            grpc.aio.insecure_channel(addresses[0]) as prefill_channel,
            grpc.aio.insecure_channel(addresses[1]) as decode_channel,
        ):
            prefill_stub = node_pb2_grpc.PrefillNodeStub(prefill_channel)
            decode_stub = node_pb2_grpc.DecodeNodeStub(decode_channel)
            yield Pair(prefill, decode, prefill_node, decode_node, prefill_stub, decode_stub, addresses[1])
    finally:
        await prefill_node.stop(0.0)
        await decode_node.stop(0.0)
