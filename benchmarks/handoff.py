"""What a hand-off costs beside the prefill: two node processes over gloo, against a raw gloo copy in the same run.

Each repetition does these in turn, so that they share the machine's moods:

1. overlapped: a prompt that no cache knows is prefilled and handed over, layer group by layer group.
2. raw copy of its messages: one after the other over a gloo pipe between the same two processes, and nothing else.
3. stored: the prompt crosses at once from the cache of a prefill node to a decode node that does not know it. Two
   further processes do this, whose model has the same KV and next to nothing to compute.
4. raw copy of those messages, between those processes.
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
from benchmarks.handoff_nodes import NodeProcesses
from benchmarks.handoff_report import Crossing, HandoffReport, HandoffSettings, Repetition, crossing
from paceline.config import NodeConfig
from paceline.errors import PacelineError
from paceline.request import SamplingParams, SequenceRequest
from paceline.v1 import node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import sequence_to_proto, trace_from_proto

POOL_PROMPTS = 4  # that a pool holds
WARM_UPS = 3  # repetitions that open the link and touch every page of both pools for the first time
COPIES = 3  # raw copies of each kind in a repetition, of which the median counts

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
    with Bench.open(config, thin=False) as real, Bench.open(headless, thin=True) as thin:
        return HandoffReport(settings, tuple(asyncio.run(_measure(real, thin, settings, progress))))


async def _measure(real: Bench, thin: Bench, settings: HandoffSettings, progress: Progress) -> list[Repetition]:
    found: list[Repetition] = []
    async with real.connected() as real_pair, thin.connected() as thin_pair:
        for i in range(WARM_UPS + settings.repeats):
            progress(i, WARM_UPS + settings.repeats, "repetitions")
            overlapped = await real_pair.cross(Asked.fresh(settings.prompt_tokens))
            overlapped_raw_s = await real.raw_copy_s(overlapped.sizes)
            stored = await thin_pair.cross_stored(settings.prompt_tokens, thin.page_size)
            found.append(Repetition(overlapped, overlapped_raw_s, stored, await thin.raw_copy_s(stored.sizes)))
    return found[WARM_UPS:]


@dataclass(frozen=True)
class Bench:
    """A pair of node processes."""

    processes: NodeProcesses
    page_size: int

    @classmethod
    @contextmanager
    def open(cls, config: NodeConfig, *, thin: bool) -> Iterator[Bench]:
        """Started, and ended."""
        processes = NodeProcesses(config, thin=thin)
        try:
            yield cls(processes, config.page_size)
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
                node_pb2_grpc.PrefillNodeStub(prefill), node_pb2_grpc.DecodeNodeStub(decode), addresses["decode"]
            )

    async def raw_copy_s(self, sizes: Sequence[int]) -> float:
        """Median seconds of a raw copy of messages of ``sizes``."""
        copies = [await asyncio.to_thread(self.processes.raw_copy_s, sizes) for _ in range(COPIES)]
        return statistics.median(copies)


@dataclass(frozen=True)
class Asked:
    """A prompt, and by what salt the decode node's prefix cache is to look for it."""

    number: int
    token_ids: tuple[int, ...]
    decode_salt: str = ""

    @classmethod
    def fresh(cls, num_tokens: int) -> Asked:
        """One that no cache knows."""
        number = next(_numbers)
        return cls(number, (2000 + number, *prompt(num_tokens - 1)))

    def again(self, num_tokens: int, decode_salt: str) -> Asked:
        """Its first tokens, which the prefill node knows and the decode node does not."""
        number = next(_numbers)
        return Asked(number, self.token_ids[:num_tokens], f"{decode_salt} {number}")

    def request(self, salt: str) -> node_pb2.SequenceRequest:
        """Two greedy tokens, so that draft state crosses too."""
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=2, ignore_eos=True)
        return sequence_to_proto(SequenceRequest(f"bench-{self.number}", self.token_ids, params, cache_salt=salt))


@dataclass(frozen=True)
class Pair:
    """Stubs of both nodes."""

    prefill: node_pb2_grpc.PrefillNodeAsyncStub
    decode: node_pb2_grpc.DecodeNodeAsyncStub
    decode_address: str

    async def cross(self, asked: Asked, tokens_below: int | None = None) -> Crossing:
        """Serve one request as the router does; what its traces say, see `crossing`."""
        call = self.decode.Decode(node_pb2.DecodeRequest(sequence=asked.request(asked.decode_salt)))
        handed_off: node_pb2.HandedOff | None = None
        async for event in call:
            if event.HasField("reserved"):
                handed_off = await self._prefill(asked, event.reserved)
        if handed_off is None:
            raise PacelineError("the hand-off did not end")
        request_id = f"bench-{asked.number}"
        message = trace_pb2.TraceRequest(request_id=request_id)
        traces = [await stub.Trace(message) for stub in (self.prefill, self.decode)]
        events = [event for trace in traces for event in trace_from_proto(request_id, trace).events]
        return crossing(events, handed_off.exposed_s, tokens_below)

    async def cross_stored(self, num_tokens: int, page_size: int) -> Crossing:
        """The rows that lie in the prefill node's cache when a prompt comes again, with one token left to compute."""
        cached = (num_tokens - 1) // page_size * page_size
        asked = Asked.fresh(num_tokens)
        await self.cross(asked)
        return await self.cross(asked.again(cached + 1, "unknown"), tokens_below=cached)

    async def _prefill(self, asked: Asked, reserved: node_pb2.Reserved) -> node_pb2.HandedOff | None:
        call = self.prefill.Prefill(
            node_pb2.PrefillRequest(
                sequence=asked.request(""),
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
