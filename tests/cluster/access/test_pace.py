"""Who causes work faster than it is allowed waits; nobody else does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cluster.access import access, pace
from cluster.access.access import Need
from cluster.access.pace import Pace
from cluster.frontdoor import held_bodies
from cluster.frontdoor.held_bodies import SMALL_BYTES, HeldBodies, HeldBody
from cluster.routing.metrics import Metrics
from paceline.errors import Unauthenticated
from tests.support.api_keys import write_keys


def test_each_caller_has_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: callers share one; what came at once is not made up for; waits have no end; callers are remembered for
    ever."""
    monkeypatch.setattr(pace, "MAX_CALLERS", 2)
    now = 0.0
    made = Pace(per_s=10.0, at_once=5.0, longest_s=0.4, clock=lambda: now)
    assert [round(made.wait_s("fast"), 3) for _ in range(11)] == [0.0] * 5 + [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    assert made.wait_s("other") == 0.0
    now = 0.4  # all waits are over, and nothing is left of what may come at once
    assert round(made.wait_s("fast"), 3) == 0.1
    now = 10.0
    assert made.wait_s("fast", 5.0) == 0.0
    made.wait_s("third")
    made.wait_s("fourth")
    assert made.wait_s("fast", 5.0) == 0.0  # forgotten


def test_a_body_that_would_wait_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bodies never wait. Mutant: they are counted too."""
    monkeypatch.setattr(held_bodies, "READ_AT_ONCE", 2 * SMALL_BYTES)
    body = HeldBody(HeldBodies(), "tenant")
    assert [body.pause_s(SMALL_BYTES, SMALL_BYTES) for _ in range(9)] == [0.0] * 9
    assert body.pause_s(3 * SMALL_BYTES, 2 * SMALL_BYTES) == 0.0
    assert body.pause_s(4 * SMALL_BYTES, SMALL_BYTES) > 0.0
    assert body.pause_s(2**30, 2**30) == held_bodies.PAUSE_S


async def test_refusals_of_one_address_come_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A client that tries on and on costs little. Mutant: each is refused at once."""
    monkeypatch.setattr(access, "REFUSALS_PER_S", 50.0)
    monkeypatch.setattr(access, "REFUSALS_AT_ONCE", 2.0)
    made, began = write_keys(tmp_path / "keys.yaml").access("model", Metrics()), time.monotonic()
    for _ in range(7):
        with pytest.raises(Unauthenticated):
            await made.admit("pl-none", "10.0.0.1", "GET /", Need.KEY)
    assert time.monotonic() - began >= 5 / 50.0
    await made.close()
