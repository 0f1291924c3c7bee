"""Ranks of nodes under kill -9, at random: no stream is lost, no token wrong, no process and no page left.

``pytest tests/chaos/test_ranks.py -s --kills 100 --streams 8 --seed N``. Rank 0 and followers are drawn alike. Each
fault shows that all processes of the hurt node are gone; every answer is compared with that of the undisturbed run.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from paceline.client import AsyncClient
from tests.chaos.deployed import options_of, view, whole, works
from tests.chaos.faults import RANK_KIND, Injector, plan
from tests.chaos.load import Load, Served, make_requests, serve, undisturbed
from tests.chaos.report import percentile
from tests.support.needs import needs_kernels
from tests.support.ranked_model import RANKED_SPEC, write_ranked_model
from tests.support.server import serve as serving
from tests.support.untrained_heads import write_tiny_head

pytestmark = [needs_kernels, pytest.mark.e2e]

GAP_S = (5.0, 15.0)  # between kills; a node is back after 8 to 18 s, and faster kills leave none alive that could serve
TURNS = 9  # of kills that found no victim
NODES = ("--prefill-nodes", "1", "--prefill-tp", "4", "--decode-tp", "2", "--no-standby")


@pytest.mark.parametrize("rank_links", ["direct", "through-0"])
async def test_kills_of_ranks_lose_nothing(rank_links: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Mutants: a node lives on without a follower; a follower outlives rank 0; rows of a lost hand-off are used."""
    kills = request.config.getoption("kills", default=None)
    if kills is None:
        pytest.skip("only with --kills")
    given = request.config.getoption("seed", default=None)
    seed, streams = int(time.time()) if given is None else given, request.config.getoption("streams", default=None) or 8
    print(f"\nseed {seed}, {streams} streams, {kills} kills")
    requests = make_requests(seed, 18)
    write_tiny_head(tmp_path / "eagle3", "eagle3", RANKED_SPEC)
    model = write_ranked_model(tmp_path / "model")
    with serving(*options_of("spare", model), *NODES, "--rank-links", rank_links) as server:
        async with AsyncClient(server.grpc) as client:
            nodes = [node.id for node in (await client.model_info()).nodes]

            async def ask(which: int, served: Served) -> None:
                await serve(client, requests[which], served)

            load = Load(ask, await undisturbed(ask, [one.kind for one in requests], streams), seed)
            pids: dict[str, int] = {}
            injector = Injector(
                lambda: [server.process.pid], lambda: view(server.processes, [server.grpc], pids), works
            )
            began = time.monotonic()
            load.start(streams)
            try:
                for turn in range(TURNS):
                    planned = plan((RANK_KIND,), seed + turn, kills * GAP_S[1], GAP_S)
                    await injector.run(planned[: kills - len(injector.faults)], time.monotonic())
            finally:
                await load.stop()
                tell(injector, load, time.monotonic() - began)
            ended = time.monotonic()
            await whole(client, nodes)
            whole_s = time.monotonic() - ended
    print(f"all nodes back, all pages free {whole_s:.1f} s after the last stream; no process left")
    assert load.wrong == []
    assert [fault.problem for fault in injector.faults if fault.problem] == []
    assert len(injector.faults) == kills, f"{dict(injector.skipped)} kills found no victim"


def tell(injector: Injector, load: Load, seconds: float) -> None:
    """Print what happened."""
    faults = injector.faults
    hurt = Counter(f"{victim}, {fault.proof.partition(' was')[0]}" for fault in faults for victim in fault.victims)
    tokens = sum(len(answer.token_ids) for served in load.done for answer in served.answers.values())
    print(f"{len(faults)} kills in {seconds:.0f} s: {dict(sorted(hurt.items()))}; skipped: {dict(injector.skipped)}")
    met = sum(any(served.began < fault.at < served.ended for fault in faults) for served in load.done)
    print(f"{len(load.done)} streams, {tokens} tokens, {len(load.wrong)} lost or wrong; {met} were under way at a kill")
    if ends := [fault.until - fault.at for fault in faults]:
        print(f"from a kill to the end of its node: p50 {percentile(ends, 0.5):.2f} s, longest {max(ends):.2f} s")
    print(*(f"  WRONG {wrong}" for wrong in load.wrong[:20]), sep="\n")
