"""When a decode node is to compute a prompt itself."""

from __future__ import annotations

from cluster.routing.bypass import BOUNDS, ENOUGH, MEASURED, TRIAL_EVERY, Bypass, Way

MANY = 40 * TRIAL_EVERY


def share(bypass: Bypass, uncached: int, running: int, seconds: tuple[float, float]) -> float:
    """How many of many requests bypass, when (bypass, pair) take so long."""
    taken = 0
    for _ in range(MANY):
        limit = bypass.limit(uncached, running)
        assert limit in (0, *BOUNDS)
        bypassed = uncached <= limit
        bypass.observe(uncached, bypassed, seconds[0] if bypassed else seconds[1])
        taken += bypassed
    return taken / MANY


def test_never_or_up_to_a_number_of_tokens() -> None:
    assert [Bypass(0).limit(n, 0) for n in (1, 100)] == [0, 0]
    assert [Bypass(64).limit(n, 9) for n in (1, 100)] == [64, 64]  # the decode node compares


def test_the_faster_way_is_taken_and_the_other_one_tried() -> None:
    trials = 1 / TRIAL_EVERY
    assert 1 - share(Bypass(MEASURED), 20, 0, (0.01, 0.02)) < trials + 0.02
    assert 0 < share(Bypass(MEASURED), 20, 0, (0.02, 0.01)) < trials + 0.02


def test_streams_that_run_there_pay_too() -> None:
    assert share(Bypass(MEASURED), 20, 4, (0.01, 0.04)) < 0.1  # 5 x 0.01 of waiting
    assert share(Bypass(MEASURED), 20, 2, (0.01, 0.04)) > 0.9


def test_classes_do_not_speak_for_one_another() -> None:
    bypass = Bypass(MEASURED)
    assert share(bypass, 16, 0, (0.01, 0.02)) > 0.9
    assert share(bypass, 500, 0, (0.09, 0.02)) < 0.1
    assert share(bypass, 16, 0, (0.01, 0.02)) > 0.9


def test_long_prompts_are_handed_over_without_trial() -> None:
    assert share(Bypass(MEASURED), BOUNDS[-1] + 1, 0, (0.0, 9.0)) == 0


def test_what_changes_is_noticed() -> None:
    bypass = Bypass(MEASURED)
    assert share(bypass, 20, 0, (0.01, 0.02)) > 0.9
    assert share(bypass, 20, 0, (0.05, 0.02)) < 0.2


def test_a_way_is_a_mean_then_a_memory_of_the_latest() -> None:
    way = Way()
    for seconds in (1.0, 2.0, 3.0):
        way.add(seconds)
    assert (way.count, way.seconds) == (ENOUGH, 2.0)
    for _ in range(100):
        way.add(5.0)
    assert abs(way.seconds - 5.0) < 0.01
