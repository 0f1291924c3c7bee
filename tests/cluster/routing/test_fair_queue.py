"""Turns of tenants, in tokens: deterministic, no clock but the tokens served."""

from __future__ import annotations

import random

import pytest

from cluster.routing.fair_queue import FairQueue, Waiting


def pushed(queue: FairQueue, tenant: str, cost: int, priority: int = 0) -> Waiting:
    request = Waiting(tenant, priority, cost, 1)
    queue.push(request)
    return request


def drained(queue: FairQueue) -> list[Waiting]:
    served = []
    while (request := queue.pop()) is not None:
        served.append(request)
    assert len(queue) == 0
    return served


def test_a_flood_delays_another_tenant_by_one_turn() -> None:
    queue = FairQueue(quantum=1000)
    for _ in range(500):
        pushed(queue, "flood", 100)
    for _ in range(7):  # in the midst of a turn
        queue.pop()
    other = pushed(queue, "other", 1000)
    before = 0
    while (request := queue.pop()) is not other:
        assert request is not None
        before += request.cost
    assert before == 300  # what was left of the turn
    for _ in range(3):
        later = pushed(queue, "other", 900)
        before = 0
        while (request := queue.pop()) is not later:
            assert request is not None
            before += request.cost
        assert before <= 1000


def test_tokens_are_shared_not_requests() -> None:
    queue = FairQueue(quantum=1000)
    for _ in range(400):
        pushed(queue, "small", 50)
        pushed(queue, "large", 750)
        pushed(queue, "huge", 3500)
    shares = {"small": 0, "large": 0, "huge": 0}
    while sum(shares.values()) < 54_000:
        request = queue.pop()
        assert request is not None
        shares[request.tenant] += request.cost
    assert max(shares.values()) - min(shares.values()) <= 1000 + 3500
    assert min(shares.values()) >= 14_000


def test_costs_far_above_the_quantum_are_reached_at_once_and_in_the_same_order() -> None:
    queue = FairQueue(quantum=1)
    for tenant, cost in (("a", 2_000_000_000), ("b", 1_999_999_999), ("c", 5)):
        pushed(queue, tenant, cost)
    assert [request.tenant for request in drained(queue)] == ["c", "b", "a"]


def test_priorities_count_within_a_tenant_only() -> None:
    queue = FairQueue(quantum=100)
    first, low, high, again = (pushed(queue, "a", 100, priority) for priority in (0, -5, 10, 10))
    other = pushed(queue, "b", 100, -10)
    assert drained(queue) == [high, other, again, first, low]


def test_who_gives_way_in_a_full_queue() -> None:
    queue = FairQueue()
    assert queue.last_of_most("a") is None
    flood = [pushed(queue, "a", 1, priority) for priority in (1, 0, -1, 0)]
    assert queue.last_of_most("b") is flood[2]
    assert queue.last_of_most("a") is None
    for _ in range(3):
        pushed(queue, "b", 1)
    assert queue.last_of_most("b") is None
    assert queue.last_of_most("c") is flood[2]


def test_arrivals_of_one_tenant_keep_their_order() -> None:
    queue = FairQueue()
    made = [pushed(queue, "", 10_000 * (i % 3) + 1) for i in range(20)]
    assert drained(queue) == made


def test_a_tenant_saves_nothing_while_it_does_not_wait() -> None:
    queue = FairQueue(quantum=1000)
    for _ in range(5):
        pushed(queue, "a", 1)
        queue.pop()
    pushed(queue, "b", 1000)
    for _ in range(4):
        pushed(queue, "a", 500)
    assert [r.tenant for r in drained(queue)] == ["b", "a", "a", "a", "a"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_each_request_goes_once_and_waits_a_bounded_time(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue(quantum=64)
    live: set[Waiting] = set()
    seen: set[Waiting] = set()
    for _ in range(400):
        action = rng.random()
        if action < 0.5:
            live.add(pushed(queue, rng.choice("abcd"), rng.randint(1, 300), rng.randint(-2, 2)))
        elif action < 0.6 and live:
            gone = rng.choice(sorted(live, key=lambda r: r.number))
            queue.remove(gone)
            live.remove(gone)
        elif live:
            expected = queue.peek()
            request = queue.pop()
            assert request is expected
            assert request in live
            live.remove(request)
            seen.add(request)
        assert len(queue) == len(live)
    assert set(drained(queue)) == live
    assert not seen & live


def test_rounds_that_nobody_can_pay_in_are_skipped_without_a_change_of_order() -> None:
    queue = FairQueue(quantum=10)
    pushed(queue, "a", 970)
    pushed(queue, "b", 961)
    assert [request.tenant for request in drained(queue)] == ["a", "b"]  # both in round 97
