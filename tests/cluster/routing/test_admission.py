"""Admission: who runs, who waits, who is refused, on a clock that the test sets."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cluster.routing import admission as admission_module
from cluster.routing.admission import RETRY_AFTER_S, Admission, Place, TenantBounds
from cluster.routing.fair_queue import QUANTUM_TOKENS
from paceline.errors import NodeUnavailable, Overloaded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waits(
    admission: Admission, tenant: str = "", *, slots: int = 1, tokens: int = 10
) -> tuple[Place, asyncio.Task[None]]:
    place = admission.enter(slots, tenant)
    return place, asyncio.create_task(admission.turn(place, tenant, 0, tokens))


async def running(admission: Admission, count: int) -> list[Place]:
    started = [waits(admission) for _ in range(count)]
    await asyncio.gather(*(task for _, task in started))
    return [place for place, _ in started]


async def test_runs_at_most_as_many_then_queues_then_refuses() -> None:
    admission = Admission(2, 2, 5.0)
    first, second = await running(admission, 2)
    queued = [waits(admission) for _ in range(2)]
    with pytest.raises(Overloaded) as caught:
        admission.enter(1)
    assert caught.value.retry_after_s == RETRY_AFTER_S
    await asyncio.sleep(0)
    assert not any(task.done() for _, task in queued)
    admission.leave(first)
    await queued[0][1]
    assert (admission.running_slots, admission.waiting, admission.slots) == (2, 1, 3)
    for place in (second, queued[0][0]):
        admission.leave(place)
    await queued[1][1]
    admission.leave(queued[1][0])
    assert (admission.running_slots, admission.waiting, admission.slots) == (0, 0, 0)


async def test_a_request_alone_runs_however_many_choices_it_has_and_is_not_overtaken() -> None:
    admission = Admission(2, 5, 5.0)
    (one,) = await running(admission, 1)
    wide, wide_task = waits(admission, "wide", slots=16)
    small, small_task = waits(admission, "small")
    await asyncio.sleep(0)
    assert not small_task.done()
    admission.leave(one)
    await wide_task
    assert not small_task.done()
    admission.leave(wide)
    await small_task
    admission.leave(small)


async def test_a_turn_that_does_not_come_in_time_is_refused() -> None:
    admission = Admission(1, 5, 0.02)
    (one,) = await running(admission, 1)
    late, task = waits(admission)
    with pytest.raises(Overloaded, match="did not come within"):
        await task
    admission.leave(late)
    admission.leave(one)
    await running(admission, 1)
    assert admission.waiting == 0


async def test_who_leaves_the_queue_is_not_started() -> None:
    admission = Admission(1, 5, 5.0)
    (one,) = await running(admission, 1)
    (gone, gone_task), (next_, next_task) = waits(admission), waits(admission)
    gone_task.cancel()
    await asyncio.gather(gone_task, return_exceptions=True)
    admission.leave(gone)
    admission.leave(one)
    await next_task
    assert not gone.running
    assert admission.running_slots == 1
    admission.leave(next_)


async def test_a_flood_neither_fills_the_queue_nor_goes_first() -> None:
    admission = Admission(1, 4, 5.0)
    (one,) = await running(admission, 1)
    flood = [waits(admission, "flood", tokens=QUANTUM_TOKENS) for _ in range(4)]
    await asyncio.sleep(0)
    other, other_task = waits(admission, "other")
    with pytest.raises(Overloaded, match="another tenant"):
        await flood[3][1]
    admission.leave(flood[3][0])
    with pytest.raises(Overloaded):
        admission.enter(1, "flood")
    await asyncio.sleep(0)
    order, places = [], dict([*flood[:3], (other, other_task)])
    admission.leave(one)
    while places:
        await asyncio.wait(places.values(), return_when=asyncio.FIRST_COMPLETED)
        (place,) = [place for place in places if place.running]
        order.append(place)
        await places.pop(place)
        admission.leave(place)
    assert order == [flood[0][0], other, flood[1][0], flood[2][0]]


async def test_retry_after_follows_the_drain_rate() -> None:
    clock = Clock()
    admission = Admission(1, 9, 5.0, clock)
    for _ in range(10):  # one each 2 s
        clock.now += 2.0
        (place,) = await running(admission, 1)
        admission.leave(place)
    clock.now += 2.0
    (one,) = await running(admission, 1)
    assert admission.retry_after_s() == pytest.approx(2.0)
    queued = [waits(admission) for _ in range(9)]
    assert admission.retry_after_s() == pytest.approx(20.0)
    clock.now += 25.0  # it slows down
    assert admission.retry_after_s() > 40.0
    clock.now += 100.0
    assert admission.retry_after_s() == RETRY_AFTER_S
    admission.close()
    for _, task in queued:
        with pytest.raises(NodeUnavailable):
            await task
    assert one.running


async def test_invented_tenants_empty_no_queue() -> None:
    """16 requests wait, and 100 with a tenant each come. Mutant: every name counts for as much as one from a key."""
    admission = Admission(1, 32, 60.0)
    (one,) = await running(admission, 1)
    honest = [waits(admission, "honest") for _ in range(16)]
    invented = []
    for i in range(100):
        with suppress(Overloaded):
            invented.append(waits(admission, f"invented-{i}"))
        await asyncio.sleep(0)
    assert len(invented) == 16
    assert not any(task.done() for _, task in honest)
    admission.leave(one)
    for place, task in (*honest, *invented):
        task.cancel()
        admission.leave(place)


async def test_a_tenant_has_no_more_than_its_share_while_others_ask() -> None:
    """The share is of sequences and of KV tokens. Alone it has all, and one request always runs. Mutants: either bound;
    the share of a tenant that is alone."""
    clock = Clock()
    admission = Admission(8, 50, 60.0, clock, TenantBounds(trusted=True, share=0.5), lambda: 1000)
    taken: list[Place] = []

    async def started(tenant: str, tokens: int, slots: int = 1) -> bool:
        place, task = waits(admission, tenant, slots=slots, tokens=tokens)
        await asyncio.sleep(0)
        taken.append(place)
        if not place.running:
            task.cancel()
        return place.running

    assert [await started("a", 300) for _ in range(3)] == [True] * 3  # nobody else asks
    assert await started("b", 600)  # above the share, and the only one of its tenant
    assert not await started("b", 10)
    assert not await started("a", 10)
    assert await started("c", 10, slots=3)
    assert not await started("c", 10, slots=2)
    while taken:
        admission.leave(taken.pop())
    clock.now += 61
    assert [await started("a", 300) for _ in range(3)] == [True] * 3
    while taken:
        admission.leave(taken.pop())
    assert admission.slots == admission.waiting == admission.running_slots == 0


async def test_who_is_kept_back_runs_when_its_own_ends() -> None:
    admission = Admission(4, 50, 60.0, Clock(), TenantBounds(trusted=True, share=0.5))
    other, other_task = waits(admission, "b")
    first = [waits(admission, "a", slots=2) for _ in range(2)]
    late, late_task = waits(admission, "b")
    await asyncio.gather(other_task, first[0][1], late_task)
    assert not first[1][0].running
    admission.leave(first[0][0])
    await first[1][1]
    for place in (first[1][0], other, late):
        admission.leave(place)


async def test_who_is_kept_back_runs_when_the_others_ask_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else happens. Mutant: only the end of a request is an occasion to look."""
    monkeypatch.setattr(admission_module, "COMPETING_S", 0.2)
    admission = Admission(4, 50, 60.0, bounds=TenantBounds(trusted=True, share=0.5))
    other, other_task = waits(admission, "b")
    await other_task
    admission.leave(other)
    first, second = [waits(admission, "a", slots=2) for _ in range(2)]
    await first[1]
    assert not second[0].running
    async with asyncio.timeout(2):
        await second[1]
    for place, _ in (first, second):
        admission.leave(place)
