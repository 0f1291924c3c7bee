"""What a hand-off costs beside the prefill: two node processes over gloo, against a raw gloo copy in the same run.

Each repetition does these in turn, so that they share the machine's moods:

1. overlapped: a prompt that no cache knows is prefilled and handed over, layer group by layer group.
2. raw copy of its messages: one after the other over a gloo pipe between the same two processes, and nothing else.
3. moved: all rows of such a prompt go from one pool to the other at once, over a link like any other, and nothing is
   computed beside them. Two further processes do this.
4. raw copy of those messages, between those processes. These two take turns several times: single ones differ by half,
   and whichever came first would find the caches as the prefill left them.

All four processes are started anew a few times: how fast memory is depends on what the machine gave a process.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks.engine import prompt
from benchmarks.handoff.nodes import HandedOver, NodeProcesses, Order
from benchmarks.handoff.report import (
    Crossing,
    HandoffReport,
    HandoffSettings,
    Move,
    Repetition,
    crossing,
    last_received_s,
)
from paceline.config import NodeConfig
from paceline.errors import PacelineError
from paceline.request import SamplingParams, SequenceRequest
from paceline.results import TraceEvent
from paceline.v1 import node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import sequence_to_proto, trace_from_proto

POOL_PROMPTS = 4  # that a pool holds
WARM_UPS = 3  # repetitions that open the link and touch every page of both pools for the first time
COPIES = 7  # moves, and raw copies of each kind, in a repetition; the median of each counts

Progress = Callable[[int, int, str], None]

_numbers = itertools.count(1)


def run(settings: HandoffSettings, progress: Progress) -> HandoffReport:
    """Start both processes, measure, stop them. Raises PacelineError when one of them fails."""
    config = NodeConfig.model_validate(
        {
            "model": settings.model,
            "drafter": settings.drafter,
            "dtype": settings.dtype,
            "threads": 1,
            "prefill_chunk_tokens": settings.chunk_tokens,
            "kv_cache_tokens": POOL_PROMPTS * settings.prompt_tokens + 1024,
            "head_check": False,
        }
    )
    headless = config.model_copy(update={"drafter": "none"})
    found: list[Repetition] = []
    shares = settings.shares()
    total, done = WARM_UPS * len(shares) + settings.repeats, itertools.count()
    for repeats in shares:
        with Bench.open(config, computes=True) as real, Bench.open(headless, computes=False) as idle:
            tell = lambda: progress(next(done), total, "repetitions")  # noqa: E731
            found += asyncio.run(_measure(real, idle, settings.prompt_tokens, repeats, tell))
    return HandoffReport(settings, tuple(found))


async def _measure(
    real: Bench, idle: Bench, prompt_tokens: int, repeats: int, tell: Callable[[], None]
) -> list[Repetition]:
    """What ``repeats`` repetitions find, behind the warm-up of a launch; ``tell`` at the start of each."""
    found: list[Repetition] = []
    async with real.connected() as real_pair, idle.connected() as idle_pair:
        for _ in range(WARM_UPS + repeats):
            tell()
            overlapped = await real_pair.cross(Asked.fresh(prompt_tokens))
            overlapped_raw_s = await real.raw_copy_s(overlapped.sizes)
            found.append(Repetition(overlapped, overlapped_raw_s, *await _take_turns(idle, idle_pair, prompt_tokens)))
    return found[WARM_UPS:]


async def _take_turns(idle: Bench, pair: Pair, prompt_tokens: int) -> tuple[Move, float]:
    """The median move, and the median seconds of the raw copies between them."""
    moves, raw_s = [], []
    for _ in range(COPIES):
        moves.append(await pair.move(Asked.fresh(prompt_tokens)))
        raw_s.append(await idle.raw_copy_once_s(moves[-1].sizes))
    return sorted(moves, key=lambda move: move.whole_s)[COPIES // 2], statistics.median(raw_s)


@dataclass(frozen=True)
class Bench:
    """A pair of node processes."""

    processes: NodeProcesses

    @classmethod
    @contextmanager
    def open(cls, config: NodeConfig, *, computes: bool) -> Iterator[Bench]:
        """Started, and ended. ``computes``: see NodeProcesses."""
        processes = NodeProcesses(config, computes=computes)
        try:
            yield cls(processes)
        finally:
            processes.close()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Pair]:
        """Stubs of both nodes."""
        addresses = self.processes.addresses
        async with (
            grpc.aio.insecure_channel(addresses["prefill"]) as prefill,
            grpc.aio.insecure_channel(addresses["decode"]) as decode,
        ):
            yield Pair(
                self.processes,
                node_pb2_grpc.PrefillNodeStub(prefill),
                node_pb2_grpc.DecodeNodeStub(decode),
                addresses["decode"],
            )

    async def raw_copy_s(self, sizes: Sequence[int]) -> float:
        """Median seconds of a raw copy of messages of ``sizes``."""
        return statistics.median([await self.raw_copy_once_s(sizes) for _ in range(COPIES)])

    async def raw_copy_once_s(self, sizes: Sequence[int]) -> float:
        """Seconds of one."""
        return await asyncio.to_thread(self.processes.raw_copy_s, sizes)


@dataclass(frozen=True)
class Asked:
    """A prompt."""

    number: int
    token_ids: tuple[int, ...]

    @classmethod
    def fresh(cls, num_tokens: int) -> Asked:
        """One that no cache knows."""
        number = next(_numbers)
        return cls(number, (2000 + number, *prompt(num_tokens - 1)))

    @property
    def request_id(self) -> str:
        """Names it in traces."""
        return f"bench-{self.number}"

    def request(self) -> node_pb2.SequenceRequest:
        """Two greedy tokens, so that draft state crosses too."""
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=2, ignore_eos=True)
        return sequence_to_proto(SequenceRequest(self.request_id, self.token_ids, params))


@dataclass(frozen=True)
class Pair:
    """Stubs of both nodes, and the processes they run in."""

    processes: NodeProcesses
    prefill: node_pb2_grpc.PrefillNodeAsyncStub
    decode: node_pb2_grpc.DecodeNodeAsyncStub
    decode_address: str

    async def cross(self, asked: Asked) -> Crossing:
        """Serve one request as the router does; what its traces say, see `crossing`."""
        call = self.decode.Decode(node_pb2.DecodeRequest(sequence=asked.request()))
        handed_off: node_pb2.HandedOff | None = None
        async for event in call:
            if event.HasField("reserved"):
                handed_off = await self._prefill(asked, event.reserved)
        if handed_off is None:
            raise PacelineError("the hand-off did not end")
        traces = [await self.trace(asked, stub) for stub in (self.prefill, self.decode)]
        return crossing([event for trace in traces for event in trace], handed_off.exposed_s)

    async def move(self, asked: Asked) -> Move:
        """The rows of a prompt, from the pool of a process without an engine."""
        call = self.decode.Decode(node_pb2.DecodeRequest(sequence=asked.request()))
        handed: HandedOver | None = None
        async for event in call:
            if event.HasField("reserved"):
                order = Order(event.reserved.ticket, self.decode_address, len(asked.token_ids))
                handed = await asyncio.to_thread(self.processes.hand_over, order)
        if handed is None:
            raise PacelineError("the hand-off did not end")
        return Move(last_received_s(await self.trace(asked, self.decode)) - handed.began_s, handed.sizes)

    async def trace(
        self, asked: Asked, stub: node_pb2_grpc.PrefillNodeAsyncStub | node_pb2_grpc.DecodeNodeAsyncStub
    ) -> tuple[TraceEvent, ...]:
        """What a node recorded of a request."""
        trace = await stub.Trace(trace_pb2.TraceRequest(request_id=asked.request_id))
        return trace_from_proto(asked.request_id, trace).events

    async def _prefill(self, asked: Asked, reserved: node_pb2.Reserved) -> node_pb2.HandedOff | None:
        call = self.prefill.Prefill(
            node_pb2.PrefillRequest(
                sequence=asked.request(),
                ticket=reserved.ticket,
                decode_address=self.decode_address,
                decode_cached_tokens=reserved.cached_tokens,
            )
        )
        handed_off = None
        async for event in call:
            if event.HasField("handed_off"):
                handed_off = event.handed_off
        return handed_off
