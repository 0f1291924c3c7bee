"""A deployment under kill -9, SIGSTOP and cut links, at random: no stream is lost, no token wrong, no page gone.

The answers of an undisturbed run of the same deployment are what every later answer is compared with: token ids, text,
log-probabilities and finish reason. ``--minutes`` says for how long; recovery times are those of the design. The suite
has a short run with routers in front of the nodes (`test_routers.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.client import AsyncClient, PacelineError
from tests.chaos.deployed import LAYOUTS, options_of, view, whole, works
from tests.chaos.faults import LINK_KINDS, PROCESS_KINDS, Fault, Injector, kinds, plan
from tests.chaos.load import Load, Served, make_requests, serve, undisturbed
from tests.chaos.report import Hit, alone, had_spare, hits_of, percentile, table
from tests.support.needs import needs_kernels
from tests.support.server import Server
from tests.support.server import serve as serving

pytestmark = [needs_kernels, pytest.mark.e2e]

TARGET_S = {True: 3.0, False: 8.0}  # p99 with and without a spare


@dataclass(frozen=True)
class Size:
    """How long and how large a run is."""

    seconds: float
    streams: int
    seed: int


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    minutes = request.config.getoption("minutes", default=None)
    if minutes is None:
        pytest.skip("only with --minutes")
    seed = request.config.getoption("seed", default=None)
    streams = request.config.getoption("streams", default=None) or 16
    return Size(60.0 * minutes, streams, int(time.time()) if seed is None else seed)


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
    requests = make_requests(size.seed, 18)
    with serving(*options_of(layout, model)) as server:
        async with AsyncClient(server.grpc) as client:
            nodes = [node.id for node in (await client.model_info()).nodes]

            async def ask(which: int, served: Served) -> None:
                await serve(client, requests[which], served)

            expected = await undisturbed(ask, [request.kind for request in requests], size.streams)
            pids: dict[str, int] = {}
            injector = Injector(
                lambda: [server.process.pid], lambda: view(server.processes, [server.grpc], pids), works
            )
            run = Run(server, client, injector)
            load = Load(ask, expected, size.seed)
            began = time.monotonic()
            load.start(size.streams, run.ended)
            await injector.run(plan(kinds(), size.seed, size.seconds, LAYOUTS[layout]["gap_s"]), began)
            await load.stop()
            await asyncio.gather(*run.reads)
            ended = time.monotonic()
            try:
                await whole(client, nodes)
                whole_s = time.monotonic() - ended
            finally:
                tell(run, load, ended - began)
    print(f"all nodes back, all pages free {whole_s:.1f} s after the last stream; no process left")
    check(run, load)


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


def check(run: Run, load: Load) -> None:
    """Nothing lost, nothing wrong, every kind of fault was there."""
    faults = run.injector.faults
    assert load.wrong == []
    assert [str(fault) + fault.problem for fault in faults if fault.problem] == []
    assert {fault.kind for fault in faults} == {*PROCESS_KINDS, *LINK_KINDS}
    assert not run.injector.skipped, "faults that hurt nobody"
    assert run.hits, "no fault hit a stream"
    for spare, target_s in TARGET_S.items():
        gaps = [hit.gap_s for hit in alone(run.hits, faults) if had_spare(hit, run.hits) is spare]
        assert not gaps or percentile(gaps, 0.99) < target_s
