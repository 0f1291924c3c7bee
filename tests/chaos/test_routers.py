"""Three routers, two prefill and two decode nodes and a Redis, all of them hurt at random under gRPC and HTTP streams.

No stream is lost, and no token and no character is wrong, comes twice or is out of order. A fault that hurt nobody
fails the run. The suite has a short run; ``--minutes`` makes it two long ones: with a Ray outside of all routers, one
of which takes over, and with the Ray of ``paceline serve`` alone, whose processes are hurt too.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from signal import SIGINT, SIGKILL

import httpx
import pytest

from paceline.client import AsyncClient
from tests.chaos.deployed import options_of, view, whole, works
from tests.chaos.faults import LINK_KINDS, PROCESS_KINDS, Fault, Injector, Node, kinds, plan
from tests.chaos.front import Front, outside_ray
from tests.chaos.front_faults import CUT_KINDS, RAY_KINDS, REDIS_KINDS, ROUTER_KINDS, SUPERVISOR_KINDS, FrontInjector
from tests.chaos.front_report import noting, pauses, resumes, stories, table
from tests.chaos.http_load import HttpRouters, make_http_requests, serve_http
from tests.chaos.load import Load, Request, Served, make_requests, serve, undisturbed
from tests.chaos.report import percentile
from tests.fakes.redis_servers import Embedded
from tests.support.needs import needs_kernels
from tests.support.server import serve as serving

pytestmark = [needs_kernels, pytest.mark.e2e]

JOINED = ["joined-1", "joined-2"]
SHORT_S, SHORT_STREAMS, SHORT_SEED = 15.0, 5, 40
SHORT_NODE_KINDS, SHORT_FRONT_KINDS = ("kill", "pause"), (*ROUTER_KINDS, "redis kill", "redis cut off")
NODE_GAP_S, FRONT_GAP_S = (9.0, 18.0), (4.0, 8.0)  # nodes take seconds to come back
SHORT_NODE_GAP_S, SHORT_FRONT_GAP_S = (5.0, 6.0), (2.5, 3.0)
RETRIES = 40  # of a client, 2 s apart in the end: all nodes may have to start, and longer than one waits by default
TOLD = 8  # moves of either kind that a long run tells of
TARGET_S = 3.0  # p99 of streams whose router was hurt; a silent one is given up after 0.7 to 2 s


@dataclass(frozen=True)
class Size:
    """How long and how large a run is. streams: of each kind."""

    seconds: float
    streams: int
    seed: int
    full: bool
    outlived: bool = False  # Ray lives on when a router that supervises is killed

    @property
    def faults(self) -> tuple[str, ...]:
        """Kinds of those in front of the nodes."""
        if not self.full:
            return SHORT_FRONT_KINDS
        return (*ROUTER_KINDS, *REDIS_KINDS, *(SUPERVISOR_KINDS if self.outlived else RAY_KINDS))


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    minutes = request.config.getoption("minutes", default=None)
    streams = request.config.getoption("streams", default=None)
    seed = request.config.getoption("seed", default=None)
    if minutes is None:
        return Size(SHORT_S, streams or SHORT_STREAMS, SHORT_SEED if seed is None else seed, False)
    return Size(60.0 * minutes, streams or 16, int(time.time()) if seed is None else seed, True, request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "size" in metafunc.fixturenames:
        full = metafunc.config.getoption("minutes", default=None) is not None
        ids = ["outside ray", "own ray"] if full else ["short"]
        metafunc.parametrize("size", [True, False] if full else [False], ids=ids, indirect=True)


@asynccontextmanager
async def fronted(model: Path, redis: Embedded, outlived: bool) -> AsyncIterator[Front]:
    """Nodes and three routers at a Redis of their own. outlived: at a Ray of their own too, so that a router which
    joined takes over when the process of ``serve`` is lost."""
    options, joining = [*options_of("spare", model), "--redis", redis.url], ["--join", redis.url]
    with ExitStack() as stack:
        ray_pid, end_with = 0, SIGINT
        if outlived:
            address, ray_pid = stack.enter_context(outside_ray(cpus=4))
            options += ["--ray-address", address, "--node-host", "127.0.0.1"]
            joining += ["--ray-address", address]
            end_with = SIGKILL
        server = stack.enter_context(serving(*options, end_with=end_with))
        front = stack.enter_context(Front(server, tuple(joining), ray_pid))
        await front.add(JOINED)
        yield front


@dataclass
class Run:
    """Streams of both kinds, and who hurts them."""

    grpc: Load
    http: Load
    front: FrontInjector
    nodes: Injector
    routers: HttpRouters

    @property
    def loads(self) -> tuple[Load, Load]:
        return self.grpc, self.http

    def under_way(self) -> list[Served]:
        """Streams of both kinds."""
        return [served for load in self.loads for served in load.under_way.values()]


async def ask_grpc(front: Front, requests: Sequence[Request], which: int, served: Served) -> None:
    """By a client of its own, which knows all routers and begins with any."""
    names = random.Random(served.request_id).sample(list(front.routers), len(front.routers))
    async with AsyncClient([front.grpc[name] for name in names], retries=RETRIES) as client:
        await serve(client, requests[which], served, names)


async def make_run(front: Front, redis: Embedded, routers: HttpRouters, client: httpx.AsyncClient, size: Size) -> Run:
    """Ask each request undisturbed; what then runs is compared with it."""
    count = 21 if size.full else 7
    asked, asked_http = make_requests(size.seed, count), make_http_requests(size.seed, count)

    async def grpc(which: int, served: Served) -> None:
        await ask_grpc(front, asked, which, served)

    async def http(which: int, served: Served) -> None:
        await serve_http(routers, client, asked_http, which, served)

    loads = []
    for name, ask, kinds_ in (("grpc", grpc, asked), ("http", http, asked_http)):
        right = await undisturbed(ask, [one.kind for one in kinds_], size.streams)
        loads.append(Load(ask, right, size.seed, name))
    pids: dict[str, int] = {}

    def seen() -> list[Node]:
        return view(front.node_processes, list(front.grpc.values()), pids)

    nodes = Injector(front.pids, seen, works)
    run = Run(loads[0], loads[1], FrontInjector(front, redis, lambda: run.under_way(), seen), nodes, routers)
    return run


async def test_routers_nodes_and_redis_are_hurt_and_nothing_is_lost(size: Size, model: Path) -> None:
    print(f"\nrouters: seed {size.seed}, {size.streams} gRPC and {size.streams} HTTP streams, {size.seconds:g} s")
    with Embedded(tcp=True) as redis:
        async with fronted(model, redis, size.outlived) as front, AsyncClient(front.main.grpc) as asking:
            names = [node.id for node in (await asking.model_info()).nodes]
            routers = HttpRouters(front.http)
            async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0)) as client:
                run = await make_run(front, redis, routers, client, size)
                watching = asyncio.create_task(routers.watch())
                began = time.monotonic()
                with noting(run.under_way):
                    await disturb(run, size, began)
                watching.cancel()
            ended = time.monotonic()
            try:
                await whole(asking, names)
            finally:
                tell(run, size, ended - began)
    assert problems(run, size) == []


async def disturb(run: Run, size: Size, began: float) -> None:
    """Both loads and both injectors, until all streams have ended."""
    for load in run.loads:
        load.start(size.streams)
    node_gap, front_gap = (NODE_GAP_S, FRONT_GAP_S) if size.full else (SHORT_NODE_GAP_S, SHORT_FRONT_GAP_S)
    node_kinds = kinds() if size.full else SHORT_NODE_KINDS
    front_kinds = size.faults
    if not set(LINK_KINDS) <= set(kinds()):  # a long run fails for it
        front_kinds = tuple(kind for kind in front_kinds if kind not in CUT_KINDS)
    async with asyncio.TaskGroup() as group:
        group.create_task(run.nodes.run(plan(node_kinds, size.seed, size.seconds, node_gap), began))
        group.create_task(run.front.run(plan(front_kinds, size.seed, size.seconds, front_gap), began))
    await asyncio.gather(*(load.stop() for load in run.loads))


Rows = list[tuple[str, list[float]]]


def of_nodes(run: Run) -> list[Fault]:
    """Faults that hurt nodes. One that is killed while there is no raylet is replaced only once there is one."""
    return run.nodes.faults + [fault for fault in run.front.faults if fault.kind == "raylet kill"]


def slow_ones(run: Run) -> list[Served]:
    """Streams that took longest to go on after a fault of their router, while nodes were well, slowest first."""
    found = [
        (pause_s, served)
        for fault in run.front.faults
        for served in run.front.on.get(id(fault), [])
        for pause_s in resumes(fault, [served], of_nodes(run))[0]
    ]
    found.sort(key=itemgetter(0), reverse=True)
    return list({served.request_id: served for _, served in found}.values())


def times(run: Run) -> tuple[list[float], Rows]:
    """Pauses of streams whose router was hurt while nodes were well. Pauses by kind of fault: of streams whose
    router was hurt, and of all while nodes or Redis were."""
    done, faults = [served for load in run.loads for served in load.done], run.front.faults + run.nodes.faults
    all_alone, rows = list[float](), Rows()
    for fault in faults:
        if fault.kind not in (*ROUTER_KINDS, *SUPERVISOR_KINDS):
            rows.append((f"all while {fault.kind}", pauses(fault, done)))
            continue
        for way in ("grpc", "http"):
            met = [one for one in run.front.on.get(id(fault), []) if one.request_id.startswith(way)]
            alone, also = resumes(fault, met, of_nodes(run))
            all_alone += alone
            rows += [(f"{fault.kind}, {way}", alone), (f"{fault.kind} and a node, {way}", also)]
    return all_alone, [*rows, ("any router fault", all_alone)]


def tell(run: Run, size: Size, seconds: float) -> None:
    """Print what happened."""
    faults = run.front.faults + run.nodes.faults
    print(f"{len(faults)} faults in {seconds:.0f} s: {dict(Counter(fault.kind for fault in faults))}")
    print(f"hit nobody: {dict(run.nodes.skipped)}")
    for load, name in zip(run.loads, ("gRPC", "HTTP"), strict=True):
        tokens = sum(len(answer.token_ids) for served in load.done for answer in served.answers.values())
        moves = sum(len(served.moves) for served in load.done)
        print(f"{name}: {len(load.done)} streams, {tokens} tokens, {moves} moves, {len(load.wrong)} lost or wrong")
        print(*(f"  WRONG {wrong}" for wrong in load.wrong[:20]), sep="\n")
    print(f"what HTTP streams were told: {dict(run.routers.errors)}")
    print(f"routers were back after {[round(s, 1) for s in run.front.starts_s]} s")
    if size.full:
        done = [served for load in run.loads for served in load.done]
        print(stories(done, slow_ones(run), [router.log for router in run.front.front.routers.values()], TOLD))
    print(table(times(run)[1]))


def problems(run: Run, size: Size) -> list[str]:
    """What was lost or wrong, and the faults that hurt nobody; empty after a good run."""
    faults = run.front.faults + run.nodes.faults
    found = [f"wrong: {wrong}" for load in run.loads for wrong in load.wrong]
    found += [f"{fault} {fault.problem}" for fault in faults if fault.problem]
    found += [f"it hurt nobody: {skipped}" for skipped in run.nodes.skipped]
    found += ["a load ended no stream" for load in run.loads if not load.done]
    if size.full:
        wanted = {*PROCESS_KINDS, *LINK_KINDS, *size.faults}
        found += [f"no fault of kind {kind}" for kind in sorted(wanted - {fault.kind for fault in faults})]
        resumed = times(run)[0]
        if not resumed or percentile(resumed, 0.99) >= TARGET_S:
            found.append(f"streams went on after {sorted(resumed)[-5:]} s")
    return found
