"""A deployment of one prefill and one decode node: what the hand-off, the router and the SDK add."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass

from benchmarks.common.console import step
from benchmarks.common.timing import REPEATS
from benchmarks.engine import Row, prompt
from cluster.deployment import Deployment
from paceline.client import AsyncClient
from paceline.config import ServeConfig
from paceline.request import SamplingParams, SequenceRequest
from paceline.v1 import node_pb2, node_pb2_grpc
from paceline.wire import sequence_to_proto

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64

_numbers = itertools.count(1)


def request(num_prompt: int, num_output: int) -> SequenceRequest:
    """A greedy request whose prompt no cache has seen."""
    number = next(_numbers)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=num_output, ignore_eos=True)
    return SequenceRequest(f"bench-{number}", (2000 + number, *prompt(num_prompt - 1)), params)


@dataclass
class Nodes:
    """Direct stubs to the two nodes, which are asked as the router asks them."""

    prefill: node_pb2_grpc.PrefillNodeAsyncStub
    decode: node_pb2_grpc.DecodeNodeAsyncStub
    decode_address: str
    deployment: Deployment

    async def first_token_s(self, apart: bool) -> float:
        """Seconds from asking the decode node to the first token, by way of the prefill node or not."""
        sequence = sequence_to_proto(request(PROMPT_TOKENS, 2))
        began = time.perf_counter()
        request_ = node_pb2.DecodeRequest(sequence=sequence, local_prefill=not apart)
        call = self.decode.Decode(request_, metadata=self.deployment.front.identity.metadata)
        took = 0.0
        async for event in call:
            if event.HasField("reserved") and apart:
                took = await self._prefill(sequence, event.reserved.ticket) - began
            elif event.HasField("tokens"):
                took = took or time.perf_counter() - began
        return took

    async def _prefill(self, sequence: node_pb2.SequenceRequest, ticket: str) -> float:
        grant = self.deployment.front.grants.sign(ticket, "prefill-0", "decode-0", sequence.cache_salt, 60.0)
        message = node_pb2.PrefillRequest(
            sequence=sequence, ticket=ticket, decode_address=self.decode_address, grant=grant
        )
        at = 0.0
        async for event in self.prefill.Prefill(message, metadata=self.deployment.front.identity.metadata):
            if event.HasField("first_token"):
                at = time.perf_counter()
        return at

    async def message_s(self) -> float:
        """Seconds per message of a stream taken from the decode node itself."""
        sequence = sequence_to_proto(request(32, OUTPUT_TOKENS))
        request_ = node_pb2.DecodeRequest(sequence=sequence, local_prefill=True)
        call = self.decode.Decode(request_, metadata=self.deployment.front.identity.metadata)
        times = [time.perf_counter() async for event in call if event.HasField("tokens")]
        return (times[-1] - times[0]) / (len(times) - 1)


async def client_message_s(client: AsyncClient) -> float:
    """Seconds per message of the same kind of stream through router and SDK."""
    asked = request(32, OUTPUT_TOKENS)
    stream = client.stream(asked.prompt_token_ids, max_tokens=OUTPUT_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
    times = [time.perf_counter() async for chunk in stream if chunk.token_ids]
    # The first token comes from prefill; decode's messages are those after it.
    return (times[-1] - times[1]) / (len(times) - 2)


async def measure(model: str) -> list[Row]:
    """Start the deployment, measure in turn, stop it."""
    config = ServeConfig(model=model, drafter="none", grpc="127.0.0.1:0", http="127.0.0.1:0", prefix_cache=False)
    deployment = Deployment(config)
    step(0, 3, "starting a deployment")
    await deployment.start()
    try:
        addresses = {slot.role: slot.address for slot in deployment.nodes.supervisor.slots}
        async with (
            deployment.front.identity.channel(addresses["prefill"], "prefill") as prefill,
            deployment.front.identity.channel(addresses["decode"], "decode") as decode,
            AsyncClient(deployment.front.grpc_address) as client,
        ):
            nodes = Nodes(
                node_pb2_grpc.PrefillNodeStub(prefill),
                node_pb2_grpc.DecodeNodeStub(decode),
                addresses["decode"],
                deployment,
            )
            step(1, 3, "times to the first token")
            apart, together = await in_turn(lambda: nodes.first_token_s(True), lambda: nodes.first_token_s(False))
            step(2, 3, "streams")
            through, direct = await in_turn(lambda: client_message_s(client), nodes.message_s)
    finally:
        await deployment.stop(grace_s=5.0)
    added, per_message = apart / together - 1, (through - direct) * 1e3
    return [
        Row(f"time to first token, {PROMPT_TOKENS} tokens, decode node alone", f"{together * 1e3:.0f} ms"),
        Row(f"time to first token, {PROMPT_TOKENS} tokens, handed off", f"{apart * 1e3:.0f} ms"),
        Row("hand-off adds", f"{added:+.1%}", "<= 15 %", added <= 0.15),
        Row("per message, from the decode node", f"{direct * 1e3:.2f} ms"),
        Row("per message, through router and SDK", f"{through * 1e3:.2f} ms"),
        Row("router and SDK add", f"{per_message:+.2f} ms", "< 2 ms", per_message < 2.0),
    ]


async def in_turn(a, b) -> tuple[float, float]:  # type: ignore[no-untyped-def]  # two async functions
    """Medians of two measurements taken alternately, after a warm-up of each."""
    await a()
    await b()
    pairs = [(await a(), await b()) for _ in range(REPEATS)]
    return statistics.median(x for x, _ in pairs), statistics.median(y for _, y in pairs)


def run(model: str) -> list[Row]:
    """The serving table."""
    return asyncio.run(measure(model))
