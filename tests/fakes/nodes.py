"""A prefill and a decode node in one process, over real loopback gRPC and real gloo, and a scripted router."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from decode_node.node import DecodeNode
from paceline.config import NodeConfig
from paceline.request import SamplingParams, SequenceRequest
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity
from paceline.v1 import common_pb2, inference_pb2, node_pb2, node_pb2_grpc
from paceline.wire import sequence_to_proto
from prefill_node.node import PrefillNode
from tests.fakes.runner import FakeRunner

_ids = itertools.count()


def node_config(**changes: Any) -> NodeConfig:
    """Small and quick; page sizes of the two roles differ unless set."""
    options: dict[str, Any] = {
        "model": "fake",
        "page_size": 4,
        "kv_cache_tokens": 512,
        "prefill_chunk_tokens": 8,
        "num_draft_tokens": 2,
        "transfer_timeout_s": 10.0,
        "handoff_deadline_s": 10.0,
        "reserve_deadline_s": 10.0,
    }
    return NodeConfig(**(options | changes))


def sequence_request(num_prompt: int = 21, max_tokens: int = 9, seed: int = 5, **changes: Any) -> SequenceRequest:
    """A request with a prompt of its own, unless ``prompt`` is given."""
    number = next(_ids)
    prompt = changes.pop("prompt", tuple((number * 37 + i * 11) % 997 for i in range(num_prompt)))
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=changes.pop("stop_token_ids", ()))
    return SequenceRequest(f"request-{number}", prompt, params, **changes)


@dataclass
class Outcome:
    """What the scripted router saw."""

    tokens: dict[int, int] = field(default_factory=dict)  # by index among the output tokens
    first_token: node_pb2.FirstToken | None = None
    handed_off: node_pb2.HandedOff | None = None
    reserved: node_pb2.Reserved | None = None
    finish_reason: int = common_pb2.FINISH_REASON_UNSPECIFIED
    rounds: list[common_pb2.Round] = field(default_factory=list)
    cached_tokens: int = 0  # of a local prefill

    @property
    def output(self) -> list[int]:
        """Tokens in order; the indexes must be without gap."""
        assert sorted(self.tokens) == list(range(min(self.tokens), min(self.tokens) + len(self.tokens)))
        return [self.tokens[index] for index in sorted(self.tokens)]

    def add(self, event: node_pb2.DecodeEvent) -> None:
        if event.HasField("finished"):
            self.finish_reason = event.finished.finish_reason
        elif event.HasField("tokens"):
            tokens = event.tokens
            for index, token_id in enumerate(tokens.token_ids, tokens.first_index):
                assert index not in self.tokens, f"token {index} came twice"
                self.tokens[index] = token_id
            if tokens.HasField("round"):
                self.rounds.append(tokens.round)
            self.cached_tokens = max(self.cached_tokens, tokens.cached_tokens)


@dataclass
class Cluster:
    """One node of each role."""

    prefill: PrefillNode
    decode: DecodeNode
    prefill_runner: FakeRunner
    decode_runner: FakeRunner
    prefill_stub: node_pb2_grpc.PrefillNodeAsyncStub
    decode_stub: node_pb2_grpc.DecodeNodeAsyncStub
    decode_address: str
    identity: Identity = field(default_factory=lambda: Identity("router"))  # of who asks the nodes
    grants: Grants | None = None

    def open_decode(self, request: SequenceRequest, *, local_prefill: bool = False) -> Any:
        """The Decode call."""
        message = node_pb2.DecodeRequest(sequence=sequence_to_proto(request), local_prefill=local_prefill)
        return self.decode_stub.Decode(message, metadata=self.identity.metadata)

    def open_prefill(self, request: SequenceRequest, reserved: node_pb2.Reserved) -> Any:
        """The Prefill call for a reservation."""
        grant = b""
        if self.grants is not None:
            grant = self.grants.sign(reserved.ticket, "prefill-0", "decode-0", request.cache_salt, 60.0)
        return self.prefill_stub.Prefill(
            node_pb2.PrefillRequest(
                sequence=sequence_to_proto(request),
                ticket=reserved.ticket,
                decode_address=self.decode_address,
                decode_cached_tokens=reserved.cached_tokens,
                grant=grant,
            ),
            metadata=self.identity.metadata,
        )

    async def generate(self, request: SequenceRequest) -> Outcome:
        """What the router does: decode first, then prefill, then both streams."""
        outcome = Outcome()
        decode = self.open_decode(request)
        event = await anext(aiter(decode))
        outcome.reserved = event.reserved
        try:
            await asyncio.gather(self._follow_prefill(request, outcome), self._follow(decode, outcome))
        finally:
            decode.cancel()
        return outcome

    async def generate_locally(self, request: SequenceRequest) -> Outcome:
        """Without a prefill node."""
        outcome = Outcome()
        await self._follow(self.open_decode(request, local_prefill=True), outcome)
        return outcome

    async def wait_for_release(self, timeout_s: float = 8.0) -> None:
        """Until no node holds a page for a request; then the books must be whole and every page free."""
        nodes = (self.prefill, self.decode)
        await wait_until(lambda: all(node.shell.status().held == 0 for node in nodes), timeout_s, "pages to return")

        def idle() -> bool:  # what a node tells of its load is of its last step, or of the end of its last request
            return all(
                load.free_pages == load.total_pages and not load.running
                for load in (_load(self.prefill), _load(self.decode))
            )

        await wait_until(idle, timeout_s, "every page to be told free")
        assert self.prefill_runner.problems() == self.decode_runner.problems() == []
        assert [node.shell.status().integrity for node in nodes] == ["", ""]

    async def _follow_prefill(self, request: SequenceRequest, outcome: Outcome) -> None:
        assert outcome.reserved is not None
        async for event in self.open_prefill(request, outcome.reserved):
            if event.HasField("first_token"):
                outcome.first_token = event.first_token
                outcome.tokens[len(request.output_token_ids)] = event.first_token.token_id
            else:
                outcome.handed_off = event.handed_off

    @staticmethod
    async def _follow(decode: Any, outcome: Outcome) -> None:
        async for event in decode:
            outcome.add(event)


def _load(node: PrefillNode | DecodeNode) -> inference_pb2.NodeInfo:
    return node.shell.load()


async def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until ``condition`` holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s in vain for {what}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def cluster(
    prefill_config: NodeConfig | None = None,
    decode_config: NodeConfig | None = None,
    prefill_weights: str = "w0",
    identity: Identity = Identity("router"),
    grants: Grants | None = None,
) -> AsyncIterator[Cluster]:
    """Both nodes, started; stopped at the end. identity, grants: of the scripted router."""
    torch.set_num_threads(1)
    prefill_config = prefill_config or node_config()
    decode_config = decode_config or node_config(page_size=8)
    prefill_runner = FakeRunner(prefill_config, weights=prefill_weights)
    decode_runner = FakeRunner(decode_config)
    prefill = PrefillNode(prefill_config, "prefill-0", prefill_runner.runner)
    decode = DecodeNode(decode_config, "decode-0", decode_runner.runner)
    prefill_address, decode_address = await prefill.start(), await decode.start()
    async with (
        identity.channel(prefill_address, "prefill", ()) as prefill_channel,
        identity.channel(decode_address, "decode", ()) as decode_channel,
    ):
        try:
            yield Cluster(
                prefill,
                decode,
                prefill_runner,
                decode_runner,
                node_pb2_grpc.PrefillNodeStub(prefill_channel),
                node_pb2_grpc.DecodeNodeStub(decode_channel),
                decode_address,
                identity,
                grants,
            )
        finally:
            for runner in (prefill_runner, decode_runner):
                runner.gate.set()
            await prefill.stop(0.0)
            await decode.stop(0.0)
