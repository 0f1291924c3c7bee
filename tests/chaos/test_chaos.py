"""A deployment under kill -9, SIGSTOP and cut links, at random: no stream is lost, no token wrong, no page gone.

The answers of an undisturbed run of the same deployment are what every later answer is compared with: token ids, text,
log-probabilities and finish reason. A short run of the layout with spare nodes is part of the suite; ``--minutes``
makes it a long one of both layouts, held to the recovery times of the design.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from paceline.client import AsyncClient, Client, PacelineError
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.chaos.faults import Fault, Injector, Node, kinds, plan
from tests.chaos.load import Load, Request, Served, differences, make_requests, serve
from tests.chaos.report import Hit, alone, had_spare, hits_of, percentile, table
from tests.chaos.sockets import who_listens
from tests.multihost.small_model import SPEC, write_model
from tests.support.needs import needs_kernels
from tests.support.server import NODE_METADATA, Server
from tests.support.server import serve as serving
from tests.support.untrained_heads import write_tiny_head

pytestmark = [needs_kernels, pytest.mark.e2e]

LAYOUTS = {
    "spare": {"nodes": 2, "drafter": "eagle3", "handoff": "draft_kv", "gap_s": (2.5, 6.0)},
    "no spare": {"nodes": 1, "drafter": "mtp", "handoff": "hidden_states", "gap_s": (6.0, 12.0)},
}
SHORT_S, SHORT_STREAMS, SHORT_GAP_S, SHORT_SEED = 14.0, 7, (1.8, 2.6), 40
TARGET_S = {True: 3.0, False: 8.0}  # p99 with and without a spare
WHOLE_TIMEOUT_S = 45.0  # until all nodes are there again, all pages back


@dataclass(frozen=True)
class Size:
    """How long and how large a run is."""

    seconds: float
    streams: int
    seed: int
    gap_s: tuple[float, float]
    full: bool


@pytest.fixture
def size(request: pytest.FixtureRequest, layout: str) -> Size:
    minutes = request.config.getoption("minutes", default=None)
    streams = request.config.getoption("streams", default=None)
    seed = request.config.getoption("seed", default=None)
    full = minutes is not None
    if not full and layout != "spare":
        pytest.skip("only with --minutes: the time of the suite is for one layout")
    return Size(
        seconds=60.0 * minutes if full else SHORT_S,
        streams=streams or (16 if full else SHORT_STREAMS),
        seed=(int(time.time()) if full else SHORT_SEED) if seed is None else seed,
        gap_s=LAYOUTS[layout]["gap_s"] if full else SHORT_GAP_S,  # type: ignore[arg-type]
        full=full,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and untrained EAGLE-3 heads beside it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("chaos")
    write_tiny_head(folder / "eagle3", "eagle3", SPEC)
    return write_model(folder / "model")


def options_of(layout: str, model: Path) -> list[str]:
    chosen = LAYOUTS[layout]
    options = {
        "model": model,
        "prefill-nodes": chosen["nodes"],
        "decode-nodes": chosen["nodes"],
        "drafter": chosen["drafter"],
        "drafters": "ngram",
        "handoff": chosen["handoff"],
        "threads-per-node": 1,
        "kv-cache-tokens": 65536,
        "trace-requests": 2048,
    }
    if chosen["drafter"] == "eagle3":
        options["drafter-path"] = model.parent / "eagle3"
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


@dataclass
class Run:
    """One deployment under faults."""

    server: Server
    client: AsyncClient
    injector: Injector
    hits: list[Hit] = field(default_factory=list)
    reads: set[asyncio.Task[None]] = field(default_factory=set)
    unread: int = 0

    def ended(self, served: Served) -> None:
        """Ask for the trace of a request that lived through a fault, while it is kept."""
        if any(served.began < fault.until + 15 and fault.at < served.ended for fault in self._faults()):
            task = asyncio.create_task(self._read(served))
            self.reads.add(task)
            task.add_done_callback(self.reads.discard)

    def _faults(self) -> list[Fault]:
        now = time.time()
        return [
            fault if fault.until else Fault(fault.kind, fault.victims, fault.spare, fault.at, now)
            for fault in self.injector.faults
        ]

    async def _read(self, served: Served) -> None:
        try:
            trace = await self.client.trace(served.request_id, timeout=10.0)
        except PacelineError:
            self.unread += 1
            return
        for fault in self._faults():
            self.hits += hits_of(fault, served, trace)


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_nothing_is_lost_and_nothing_is_wrong(layout: str, size: Size, model: Path) -> None:
    print(f"\n{layout}: seed {size.seed}, {size.streams} streams, {size.seconds:g} s")
    requests = make_requests(size.seed, 18 if size.full else 9)
    with serving(*options_of(layout, model)) as server:
        async with AsyncClient(server.grpc) as client:
            nodes = [node.id for node in (await client.model_info()).nodes]
            expected = await undisturbed(client, requests, size.streams)
            pids: dict[str, int] = {}
            injector = Injector(server.process.pid, lambda: view(server, pids))
            run = Run(server, client, injector)
            load = Load(client, requests, expected, size.seed)
            began = time.monotonic()
            load.start(size.streams, run.ended)
            await injector.run(plan(kinds(), size.seed, size.seconds, size.gap_s), began)
            await load.stop()
            await asyncio.gather(*run.reads)
            ended = time.monotonic()
            try:
                await whole(client, nodes)
                whole_s = time.monotonic() - ended
            finally:
                tell(run, load, ended - began)
    print(f"all nodes back, all pages free {whole_s:.1f} s after the last stream; no process left")
    check(run, load, size)


def tell(run: Run, load: Load, seconds: float) -> None:
    """Print what happened."""
    faults = run.injector.faults
    counts = Counter(fault.kind for fault in faults)
    tokens = sum(len(answer.token_ids) for served in load.done for answer in served.answers.values())
    print(f"{len(faults)} faults in {seconds:.0f} s: {dict(counts)}; no victim there: {dict(run.injector.skipped)}")
    print(f"{len(load.done)} streams, {tokens} tokens, {len(load.wrong)} lost or wrong, {run.unread} traces not read")
    print(table(run.hits, faults))
    for hit in sorted(run.hits, key=lambda hit: -hit.gap_s)[:8]:
        print(f"  {hit.gap_s:.2f} s: {hit.request_id} {hit.kind}: {hit.fault.kind} of {hit.fault.victims}: {hit.story}")
    log = run.server.log.read_text().splitlines() if load.wrong else []
    for wrong in load.wrong[:20]:
        print(f"  WRONG {wrong}")
        request_id = wrong.partition(" ")[0]
        print(*(f"    {line}" for line in log if f"{request_id}:" in line or f"{request_id}#" in line), sep="\n")


def check(run: Run, load: Load, size: Size) -> None:
    """Nothing lost, nothing wrong, every kind of fault was there."""
    faults = run.injector.faults
    assert load.wrong == []
    assert [str(fault) + fault.problem for fault in faults if fault.problem] == []
    assert {fault.kind for fault in faults} == set(kinds())
    assert run.hits, "no fault hit a stream"
    if size.full:
        for spare, target_s in TARGET_S.items():
            gaps = [hit.gap_s for hit in alone(run.hits, faults) if had_spare(hit, run.hits) is spare]
            assert not gaps or percentile(gaps, 0.99) < target_s


async def undisturbed(client: AsyncClient, requests: list[Request], streams: int) -> list[Served]:
    """What the requests give without faults."""
    limit = asyncio.Semaphore(streams)

    async def one(number: int, request: Request) -> Served:
        async with limit:
            return await serve(client, request, f"undisturbed-{number}")

    began = time.monotonic()
    served = await asyncio.gather(*(one(number, request) for number, request in enumerate(requests)))
    tokens = sum(len(answer.token_ids) for one in served for answer in one.answers.values())
    print(f"undisturbed: {len(served)} requests, {tokens} tokens in {time.monotonic() - began:.1f} s")
    assert [problem for one in served for problem in differences(one, one)] == []
    return served


def view(server: Server, pids: dict[str, int]) -> list[Node]:
    """The nodes that the router has, with their processes. pids: by address, those known."""
    with Client(server.grpc) as client:
        nodes = client.model_info(timeout=10.0).nodes
    found = []
    for node in nodes:
        if node.address not in pids:
            port = int(node.address.rpartition(":")[2])
            pid = who_listens((process.pid for process in server.processes()), port)
            if pid is None:
                continue
            pids[node.address] = pid
        found.append(Node(node.id, node.role, pids[node.address]))
    return found


async def whole(client: AsyncClient, nodes: list[str]) -> None:
    """Until every node is there, holds nothing and has all its pages."""
    state: Any = None
    try:
        async with asyncio.timeout(WHOLE_TIMEOUT_S):
            while True:
                info = await client.model_info()
                state = [await status_of(node.address, node.role) for node in info.nodes]
                ids = [node.id for node in info.nodes]
                if ids == nodes and all(one is not None and is_free(one) for one in state):
                    break
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise AssertionError(f"not whole within {WHOLE_TIMEOUT_S:g} s: {state}") from None
    assert [one.integrity for one in state] == [""] * len(nodes)


def is_free(status: node_pb2.StatusResponse) -> bool:
    node = status.node
    free: bool = node.free_pages == node.total_pages
    return free and status.held == node.running == node.waiting == 0


async def status_of(address: str, role: str) -> node_pb2.StatusResponse | None:
    async with grpc.aio.insecure_channel(address) as channel:
        make: Any = node_pb2_grpc.DecodeNodeStub if role == "decode" else node_pb2_grpc.PrefillNodeStub
        try:
            answer: node_pb2.StatusResponse = await make(channel).Status(
                node_pb2.StatusRequest(), timeout=2.0, metadata=NODE_METADATA
            )
        except grpc.aio.AioRpcError:
            return None
    return answer
