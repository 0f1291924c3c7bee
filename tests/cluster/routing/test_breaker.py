"""Circuit breakers: their states on a clock that the test sets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.routing.breaker import FAILURES_TO_OPEN, OPEN_S, SUCCESSES_TO_CLOSE, Breakers
from cluster.state.registry_types import NodeRecord

A, B = (NodeRecord(f"decode-{i}", "decode", 1, "h:1") for i in range(2))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakers(clock: Clock) -> Breakers:
    return Breakers(clock)


def fail(breakers: Breakers, node: NodeRecord, times: int = FAILURES_TO_OPEN) -> None:
    for _ in range(times):
        breakers.began(node)
        breakers.failed(node)


def test_consecutive_failures_open_it(breakers: Breakers) -> None:
    fail(breakers, A, 4)
    assert breakers.state(A) == "closed"
    breakers.succeeded(A)
    fail(breakers, A, 4)
    assert breakers.usable([A, B]) == [A, B]
    fail(breakers, A, 1)
    assert breakers.state(A) == "open"
    assert breakers.usable([A, B]) == [B]


def test_one_probe_at_a_time_and_two_successes_close_it(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, A)
    clock.now += OPEN_S - 0.01
    assert not breakers.admits(A)
    clock.now += 0.01
    for done in range(SUCCESSES_TO_CLOSE):
        assert breakers.state(A) == "half_open", done
        assert breakers.admits(A)
        breakers.began(A)
        assert not breakers.admits(A)
        breakers.succeeded(A)
    assert breakers.state(A) == "closed"
    fail(breakers, A, FAILURES_TO_OPEN - 1)  # what failed before is forgotten
    assert breakers.state(A) == "closed"


def test_a_failed_probe_opens_it_for_as_long_again(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, A)
    clock.now += OPEN_S
    breakers.began(A)
    breakers.succeeded(A)
    fail(breakers, A, 1)
    assert breakers.state(A) == "open"
    clock.now += OPEN_S
    assert breakers.admits(A)
    breakers.began(A)
    breakers.succeeded(A)
    assert breakers.state(A) == "half_open"  # the success before the failure no longer counts


def test_a_probe_without_a_verdict_lets_the_next_one_through(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, A)
    clock.now += OPEN_S
    breakers.began(A)
    breakers.left(A)
    assert breakers.admits(A)
    assert breakers.state(A) == "half_open"


def test_while_open_late_verdicts_change_nothing(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, A)
    clock.now += OPEN_S / 2
    breakers.succeeded(A)
    breakers.failed(A)
    assert breakers.state(A) == "open"
    clock.now += OPEN_S / 2
    assert breakers.admits(A)


def test_when_all_are_open_the_one_that_opened_first_is_tried(breakers: Breakers, clock: Clock) -> None:
    fail(breakers, B)
    clock.now += 1
    fail(breakers, A)
    assert breakers.usable([A, B]) == []
    assert breakers.usable_or_oldest([A, B]) == [B]
    assert breakers.usable_or_oldest([]) == []


def test_a_new_generation_begins_closed_and_the_old_one_is_forgotten(breakers: Breakers) -> None:
    fail(breakers, A)
    assert breakers.state(replace(A, generation=2)) == "closed"
    assert not breakers.admits(A)
    breakers.retain({("decode-0", 2)})
    assert breakers.state(A) == "closed"
