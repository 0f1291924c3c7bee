"""A client whose calls are refused asks less and less again, and loses no stream that is under way. Real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from paceline.client import AsyncClient, Client, NodeUnavailable
from paceline.client.failover import BUDGET, GIVEN_BACK, Patience, RetryBudget
from tests.client.test_failover import TEXT, Failure, collected, joined, with_death
from tests.support.scripted_nodes import Fleet, fleet
from tests.support.two_routers import One, Two, scripted, two_routers

CALLS = 15


@asynccontextmanager
async def routers(**options: Any) -> AsyncIterator[tuple[Fleet, Two]]:
    async with fleet(**options) as nodes:
        nodes.nodes["decode-0"].script.round_size = 1
        async with two_routers(scripted(nodes), nodes.router.config, "") as two:
            yield nodes, two


def refused(one: One) -> int:
    """Calls that a router could serve from no node."""
    lines = one.router.metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith('paceline_requests_total{status="NodeUnavailable"')]
    return int(sum(float(line.split()[-1]) for line in found))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
async def test_routers_that_refuse_are_asked_again_within_a_budget(blocking: bool, streamed: bool) -> None:
    """Both have no node. Mutants: without a budget each call is asked twice; what is answered gives nothing back."""
    async with routers(queue_timeout_s=0.02) as (nodes, two):
        records = dict(nodes.registry.records)
        nodes.registry.records.clear()

        async def ask(client: Any) -> None:
            if blocking:
                use = (lambda *a, **b: list(client.stream(*a, **b))) if streamed else client.generate
                await asyncio.to_thread(use, "hello", max_tokens=2)
            elif streamed:
                await collected(client, max_tokens=2)
            else:
                await client.generate("hello", max_tokens=2)

        client: Any = Client(two.addresses) if blocking else AsyncClient(two.addresses)
        for _ in range(CALLS):
            with pytest.raises(NodeUnavailable):
                await ask(client)
        again = int(BUDGET / 2)
        assert refused(two.a) + refused(two.b) == CALLS + again
        nodes.registry.records.update(records)
        for _ in range(round(2 / GIVEN_BACK)):
            await ask(client)
        nodes.registry.records.clear()
        for _ in range(CALLS):
            with pytest.raises(NodeUnavailable):
                await ask(client)
        assert refused(two.a) + refused(two.b) == 2 * CALLS + again + 2
        await asyncio.to_thread(client.close) if blocking else await client.close()


async def test_a_router_that_drains_refuses_many_at_once_and_none_is_lost() -> None:
    """The next router takes them. Mutant: a first try costs as much as another one."""
    async with routers() as (_, two), AsyncClient(two.addresses) as client:
        two.a.router.drain()
        told = await asyncio.gather(*(client.generate("hello", max_tokens=3, seed=5) for _ in range(CALLS)))
        assert {generation.text for generation in told} == {TEXT[:3]}


async def test_a_stream_goes_on_without_a_budget() -> None:
    """Its router dies when nothing is left of it. Mutant: a stream that is under way is bounded too."""
    async with routers() as (_, two), AsyncClient(two.addresses) as client:
        for _ in range(int(BUDGET)):
            client._routers.budget.refused(retry=True)
        chunks = await with_death(two, 4, collected(client))
        assert joined(chunks)[0] == TEXT[:12]


def test_what_costs_and_what_gives_back() -> None:
    """Mutants: a lost connection costs; so does a stream that is under way."""
    full, lost = Failure(grpc.StatusCode.UNAVAILABLE, told=True), Failure(grpc.StatusCode.UNAVAILABLE)
    budget = RetryBudget()

    def fail(error: Failure, times: int, *, started: bool) -> None:
        patience = Patience(routers=3, retries=8, timeout_s=100, budget=budget)
        for _ in range(times):
            with suppress(NodeUnavailable):
                patience.pause_s(error, started=started)

    for error, started in ((lost, False), (lost, True), (full, True)):
        fail(error, 9, started=started)
        assert budget._left == BUDGET
    fail(full, 1, started=False)
    assert budget._left == BUDGET
    fail(full, 3, started=False)
    assert budget._left == BUDGET - 2
    answered = Patience(routers=3, retries=8, timeout_s=100, budget=budget)
    for _ in range(3):  # chunks of one answer
        answered.progressed()
    assert budget._left == pytest.approx(BUDGET - 2 + GIVEN_BACK)
