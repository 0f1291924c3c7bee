"""The injector: a fault counts when it is proven to have hit something. And what is cut off hears nobody."""

from __future__ import annotations

import asyncio
import os

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.chaos.faults import ATTEMPTS, LINK_KINDS, Injector, Node, NothingThere, Planned, isolate, kinds
from tests.fakes.redis_servers import Embedded

ANSWER_S, AWAY_S = 0.2, 1.0


class Scripted(Injector):
    """Each attempt says the next of these, or that nothing was there."""

    said: list[str]

    async def _do(self, planned: Planned, nodes: list[Node]) -> str:
        if proof := self.said.pop(0):
            return proof
        raise NothingThere("no packet came in on 7 sockets")


@pytest.mark.parametrize(
    ("said", "proofs", "skipped"),
    [
        (["hit"], ["hit"], 0),
        (["", "hit"], ["hit"], 0),
        ([""] * ATTEMPTS, [], 1),
    ],
)
async def test_a_fault_that_hit_nothing_is_done_again_and_does_not_count(
    said: list[str], proofs: list[str], skipped: int
) -> None:
    async def works(node: Node) -> bool:
        return True

    injector = Scripted(lambda: [os.getpid()], lambda: [Node("decode-0", "decode", os.getpid())], works)
    injector.said = list(said)
    await injector.run([Planned(at_s=0.0, kind="pause", draw=0.0, hold=0.0)], origin=0.0)
    assert [fault.proof for fault in injector.faults] == proofs
    assert [fault.problem for fault in injector.faults] == [""] * len(proofs)
    assert injector.skipped["pause"] == skipped
    assert injector.said == []


async def test_a_redis_that_is_cut_off_answers_nobody() -> None:
    """Neither on a connection that was there nor on a new one, which nobody refuses either; and then it is there."""
    if not set(LINK_KINDS) <= set(kinds()):
        pytest.skip("needs to touch another process's sockets")
    with Embedded(tcp=True) as server:

        def client() -> redis.Redis:
            limits = {"socket_timeout": ANSWER_S, "socket_connect_timeout": ANSWER_S, "retry": Retry(NoBackoff(), 0)}
            return redis.Redis.from_url(server.url, **limits)

        with client() as old, client() as new:
            assert old.ping()
            cut = asyncio.create_task(isolate(server.pid, AWAY_S))
            await asyncio.sleep(AWAY_S / 4)
            for one in (old, new):
                with pytest.raises(redis.TimeoutError):
                    await asyncio.to_thread(one.ping)
            assert "packets refused" in await cut
            assert new.ping()
