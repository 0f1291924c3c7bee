"""The router's queue: who waits, in what order requests run, what the others are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.contract import public_wire
from cluster.contract.generation import GenerationRequest
from cluster.frontdoor.openai_parse import parse_completion
from paceline.errors import InvalidRequest, NodeUnavailable, Overloaded
from paceline.results import Generation
from paceline.v1 import inference_pb2
from tests.support.router_asks import TEXT, answer, ask
from tests.support.scripted_nodes import Fleet, fleet


async def started(made: Fleet, *requests: GenerationRequest) -> list[asyncio.Task[Generation]]:
    """Tasks that all run or are queued, in order."""
    tasks, admission = [], made.router._admission
    for request in requests:
        before = admission.slots
        tasks.append(asyncio.create_task(answer(made, request)))
        while not (before < admission.slots == admission.running_slots + len(admission._places)):
            await asyncio.sleep(0.005)
    return tasks


def metric(made: Fleet, line: str) -> bool:
    return line in made.router.metrics.render().decode().splitlines()


def order(made: Fleet) -> list[str]:
    return [sequence.request_id for sequence in made.nodes["decode-0"].sequences]


def named(name: str, tenant: str = "", priority: int = 0) -> GenerationRequest:
    return replace(ask(tenant=tenant), request_id=name, priority=priority)


async def test_requests_wait_and_run_by_tenant_then_priority() -> None:
    async with fleet(max_inflight=1, max_queued=8) as made:
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        asked = [named("running"), named("a"), named("b"), named("urgent", priority=5), named("other", "other", -10)]
        tasks = await started(made, *asked)
        assert metric(made, "paceline_requests_queued 4.0")
        assert metric(made, "paceline_requests_running 1.0")
        gate.set()
        assert {result.text for result in await asyncio.gather(*tasks)} == {TEXT[:10]}
        assert order(made) == ["running", "urgent", "a", "b", "other"]  # all of "" is one turn's worth
        assert metric(made, "paceline_queue_seconds_count 5.0")
        assert metric(made, "paceline_requests_running 0.0")
        assert made.router.inflight == 0


async def test_a_flood_of_large_requests_delays_another_tenant_by_one_turn() -> None:
    async with fleet(max_inflight=1, max_queued=64) as made:
        made.router._admission._queue._quantum = 128  # what one of these requests takes
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        flood = [replace(ask(123, tenant="flood"), request_id=f"flood {i}") for i in range(8)]
        tasks = await started(made, *flood, named("other", "other"))
        gate.set()
        await asyncio.gather(*tasks)
        assert order(made).index("other") == 2  # after the one that ran and one turn


async def test_too_many_wait_or_too_long() -> None:
    async with fleet(max_inflight=1, max_queued=1, queue_timeout_s=2.0) as made:
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        (running,) = await started(made, ask())
        (late,) = await started(made, ask())
        with pytest.raises(Overloaded, match="no more") as caught:
            await answer(made, ask())
        assert caught.value.retry_after_s > 0
        with pytest.raises(Overloaded, match="did not come"):
            await late
        assert metric(made, 'paceline_requests_total{status="Overloaded"} 2.0')
        gate.set()
        await running
        assert (await answer(made, ask())).text == TEXT[:10]
        assert metric(made, "paceline_requests_running 0.0")


async def test_a_client_that_leaves_the_queue_and_a_router_that_stops() -> None:
    async with fleet(max_inflight=1) as made:
        made.nodes["decode-0"].script.gate = asyncio.Event()
        running, gone, waiting = await started(made, ask(), ask(), ask())
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert metric(made, "paceline_requests_queued 1.0")
        assert metric(made, 'paceline_requests_total{status="cancelled"} 1.0')
        while not order(made):
            await asyncio.sleep(0.005)
        await made.router.close()
        for task in (running, waiting):
            with pytest.raises(NodeUnavailable):
                await task
        assert len(made.nodes["decode-0"].sequences) == 1


def test_priority_comes_from_both_apis_and_outlives_a_router() -> None:
    message = inference_pb2.GenerateRequest(text="x", priority=-3)
    assert public_wire.generation_request(message).priority == -3
    admitted = public_wire.admitted_request(replace(ask(prompt=(1,)), priority=4))
    assert public_wire.generation_request(admitted).priority == 4
    assert parse_completion({"prompt": "x", "priority": 7}, "id").generation.priority == 7
    with pytest.raises(InvalidRequest, match="priority"):
        parse_completion({"prompt": "x", "priority": "high"}, "id")


async def test_a_full_router_does_not_tokenize_nor_trace() -> None:
    """Mutant: work that is no request passes by admission."""
    async with fleet(max_inflight=1, max_queued=0) as made:
        made.nodes["decode-0"].script.gate = asyncio.Event()
        running = asyncio.create_task(made.router.complete(ask()))
        while not made.router.inflight:
            await asyncio.sleep(0.005)
        for asked in (made.router.tokenize("hello"), made.router.trace("req-1")):
            with pytest.raises(Overloaded):
                await asked
        made.nodes["decode-0"].script.gate.set()
        await running
        assert (await made.router.tokenize("hi")).token_ids == (104, 105)
        assert made.router.inflight == 0
