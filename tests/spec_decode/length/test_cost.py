"""The cost table: what is measured comes back, times never fall, strays are refused, drift is followed."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec_decode.length.cost import (
    DRAFT_SHARE,
    OUTLIERS_IN_A_ROW,
    CostTable,
    Grid,
    MeasureGrid,
    is_monotone,
    isotonic,
)

GRID = MeasureGrid(limit_s=1e9)
TIMES = st.floats(1e-4, 1.0)


def linear(batch: int, rows: int) -> float:
    return 0.01 + 0.0004 * batch + 0.0002 * rows


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 7), (3, 3), (3, 20), (5, 37), (24, 200), (32, 512)])
def test_a_linear_cost_comes_back_between_the_points(batch: int, rows: int) -> None:
    assert CostTable.measure(linear, GRID).estimate(batch, rows) == pytest.approx(linear(batch, rows))


def test_outside_the_points() -> None:
    table = CostTable.measure(linear, GRID)
    assert table.estimate(2, 64) == pytest.approx(linear(2, 64))  # more rows per sequence than measured
    assert table.estimate(64, 256) == pytest.approx(linear(32, 256))  # more sequences: the rows count
    assert table.estimate(64, 2048) == pytest.approx(linear(32, 2048))


def test_the_bend_at_the_ridge_is_followed() -> None:
    def roofline(batch: int, rows: int) -> float:
        return max(0.010, 0.010 * rows / 64)

    table = CostTable.measure(roofline, GRID)
    for batch, rows in [(1, 1), (8, 40), (8, 64), (16, 64), (16, 128), (32, 256), (32, 448)]:
        assert table.estimate(batch, rows) == pytest.approx(roofline(batch, rows), rel=0.05)


@given(st.lists(TIMES, min_size=30, max_size=30), st.integers(1, 40), st.integers(1, 40), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_never_falls_whatever_was_measured(times: list[float], batch: int, rows: int, more: int) -> None:
    points = iter(times)
    table = CostTable.measure(lambda b, r: next(points), MeasureGrid(repeats=1, limit_s=1e9))
    rows += batch
    assert table.estimate(batch, rows) <= table.estimate(batch, rows + more) + 1e-12
    per_seq = 1 + rows // batch
    assert table.estimate(batch, batch * per_seq) <= table.estimate(batch + more, (batch + more) * per_seq) + 1e-12


@given(st.lists(TIMES, min_size=1, max_size=12))
def test_isotonic_is_the_nearest_rising_sequence(values: list[float]) -> None:
    fitted = isotonic(values)
    assert all(a <= b + 1e-12 for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))
    # Least squares over the cone of rising sequences: the residual is orthogonal to the fit and blames no later rise.
    residual = [v - f for v, f in zip(values, fitted, strict=True)]
    assert sum(r * f for r, f in zip(residual, fitted, strict=True)) == pytest.approx(0.0, abs=1e-9)
    assert all(sum(residual[i:]) <= 1e-9 for i in range(len(values)))


def test_best_of_repeats_and_noise_is_ironed_out() -> None:
    rng = random.Random(3)
    table = CostTable.measure(lambda b, r: linear(b, r) * (1 + abs(rng.gauss(0, 0.2))), GRID)
    for batch, rows in [(1, 1), (4, 16), (32, 256)]:
        assert table.estimate(batch, rows) == pytest.approx(linear(batch, rows), rel=0.12)


def test_measuring_stops_at_the_limit() -> None:
    now = [0.0]
    calls: list[tuple[int, int]] = []

    def run(batch: int, rows: int) -> float:
        calls.append((batch, rows))
        now[0] += 0.5
        return linear(batch, rows)

    table = CostTable.measure(run, MeasureGrid(limit_s=5.0), clock=lambda: now[0])
    assert now[0] == 5.0
    assert max(rows for _, rows in calls) <= 4  # the small ones came first
    assert table.estimate(32, 512) == pytest.approx(0.01 + 0.0002 * 512, rel=0.8)  # by the line through them
    assert table.estimate(1, 1) == pytest.approx(linear(1, 1))


def test_one_point_alone_does_not_make_rows_free() -> None:
    calls = iter([0.0, 0.0, *[9.0] * 500])
    table = CostTable.measure(linear, MeasureGrid(limit_s=1.0), clock=lambda: next(calls))
    assert table.estimate(1, 9) > 1.2 * table.estimate(1, 1)


def test_a_host_that_slows_down_is_followed_everywhere() -> None:
    table = CostTable.measure(linear, GRID)
    for _ in range(200):
        assert table.observe(4, 16, 1.5 * linear(4, 16))
    assert table.estimate(4, 16) == pytest.approx(1.5 * linear(4, 16), rel=0.02)
    assert table.estimate(1, 1) > 1.05 * linear(1, 1)  # never visited, and yet
    for _ in range(200):
        for batch, rows in [(1, 1), (2, 8), (4, 16), (16, 64)]:
            table.observe(batch, rows, 1.5 * linear(batch, rows))
    for batch, rows in [(1, 1), (4, 16), (16, 64), (32, 512)]:
        assert table.estimate(batch, rows) == pytest.approx(1.5 * linear(batch, rows), rel=0.1)


def test_strays_are_refused_until_they_are_the_rule() -> None:
    table = CostTable.measure(linear, GRID)
    before = table.estimate(1, 4)
    for _ in range(OUTLIERS_IN_A_ROW - 1):
        assert not table.observe(1, 4, 10 * before)
    assert table.observe(1, 4, before)
    assert table.estimate(1, 4) == before
    assert not table.observe(1, 4, 0.0)
    for _ in range(300):
        table.observe(1, 4, 10 * before)
    assert table.estimate(1, 4) == pytest.approx(10 * before, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16), st.floats(0.4, 2.5)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_observations_keep_it_monotone(seen: list[tuple[int, int, float]]) -> None:
    table = CostTable.measure(linear, GRID)
    for batch, per_seq, factor in seen:
        table.observe(batch, batch * per_seq, factor * linear(batch, batch * per_seq))
    assert is_monotone([[table.target.at(b, n) for n in GRID.rows_per_seq] for b in GRID.batches])


def test_a_drafter_never_timed_is_assumed_and_the_first_time_sets_the_level() -> None:
    table = CostTable.measure(linear, GRID)
    assert table.draft_seconds("mtp", 2, 4) == pytest.approx(4 * DRAFT_SHARE * linear(2, 2))
    assert table.draft_seconds("mtp", 2, 0) == table.draft_seconds("mtp", 0, 4) == 0.0
    table.observe_draft("mtp", 2, 4, 0.0001)
    assert table.draft_seconds("mtp", 2, 4) == pytest.approx(0.0001)
    assert table.draft_seconds("mtp", 2, 2) == pytest.approx(0.00005)
    assert table.draft_seconds("eagle", 2, 4) == pytest.approx(4 * DRAFT_SHARE * linear(2, 2))


def test_draft_costs_are_learned_by_depth() -> None:
    table = CostTable.measure(linear, GRID)
    for _ in range(300):
        for depth in (1, 2, 4, 8):
            table.observe_draft("mtp", 1, depth, 0.002 + 0.001 * depth)
    for depth in (1, 2, 3, 4, 6, 8):
        assert table.draft_seconds("mtp", 1, depth) == pytest.approx(0.002 + 0.001 * depth, rel=0.1)


def test_draft_costs_measured_at_the_start() -> None:
    table = CostTable.measure(linear, GRID)
    table.measure_draft("mtp", lambda batch, depth: 0.001 * depth + 0.0001 * batch, MeasureGrid(limit_s=1e9))
    assert table.draft_seconds("mtp", 4, 3) == pytest.approx(0.0034)
    assert table.draft_seconds("mtp", 4, 0) == 0.0


def test_an_assumed_table_takes_the_first_measurement() -> None:
    table = CostTable.assumed(0.01)
    assert table.estimate(1, 8) == pytest.approx(0.01 * (1 + 7 * 0.035))
    ratio = table.estimate(4, 16) / table.estimate(1, 1)
    table.observe(1, 1, 0.5)
    assert table.estimate(1, 1) == pytest.approx(0.5)
    assert table.estimate(4, 16) == pytest.approx(0.5 * ratio)


def test_drafters_kept_are_bounded() -> None:
    table = CostTable(Grid((1,), (1,), [[0.01]]))
    for i in range(100):
        table.observe_draft(f"d{i}", 1, 1, 0.001)
    assert len(table._drafts) <= 32
    assert table.draft_seconds("d99", 1, 1) == pytest.approx(0.001)
