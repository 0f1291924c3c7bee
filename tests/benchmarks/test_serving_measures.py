"""Percentiles, goodput and the report, against figures worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.serving.client import Outcome
from benchmarks.serving.measures import Objective, Record, equal_texts, meets, percentile, record, summarise
from benchmarks.serving.plot import plot
from benchmarks.serving.report import Run, ServingReport, Settings, grid
from benchmarks.serving.workload import Ask
from benchmarks.tables import markdown
from paceline.errors import ConfigError

OBJECTIVE = Objective(ttft_ms=500.0, tpot_ms=50.0)
GOOD = Record(0, 1.0, 10, 5, 0.1, 400.0, 40.0, 2000.0, (30.0, 50.0), "aa", "")


def outcome(stamps: list[float], tokens: int, error: str = "") -> Outcome:
    ask = Ask(3, 1.5, "text", 10, 8, 0)
    return Outcome(ask, 0.002, stamps, 2.0, 11, tokens, True, "abc", error)


@pytest.mark.parametrize(("share", "expected"), [(0.0, 10.0), (0.5, 25.0), (0.9, 37.0), (1.0, 40.0), (1 / 3, 20.0)])
def test_percentiles(share: float, expected: float) -> None:
    assert percentile([40.0, 10.0, 30.0, 20.0], share) == pytest.approx(expected)


def test_percentiles_of_none_and_of_one() -> None:
    assert math.isnan(percentile([], 0.5))
    assert percentile([7.0], 0.99) == 7.0


def test_times_of_a_request() -> None:
    """Two events bring five tokens: four after the first in 0.6 s."""
    kept = record(outcome([0.4, 1.0], 5))
    assert (kept.ttft_ms, kept.tpot_ms, kept.e2e_ms, kept.gaps_ms) == (400.0, 150.0, 2000.0, (600.0,))
    assert (kept.prompt_tokens, kept.at_s, kept.late_ms) == (11, 1.5, 2.0)


def test_times_that_a_request_does_not_have() -> None:
    assert record(outcome([0.4], 1)).tpot_ms is None
    assert record(outcome([], 0)).ttft_ms is None
    assert record(outcome([0.4, 0.5], 2, "broken")).e2e_ms is None


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"ttft_ms": 500.0, "tpot_ms": 50.0}, True),
        ({"ttft_ms": 501.0}, False),
        ({"tpot_ms": 50.1}, False),
        ({"tpot_ms": None}, True),
        ({"ttft_ms": None}, False),
        ({"error": "late"}, False),
    ],
)
def test_goodness(change: dict[str, object], good: bool) -> None:
    assert meets(replace(GOOD, **change), OBJECTIVE) == good  # type: ignore[arg-type]


def test_a_summary_over_two_runs() -> None:
    """First run: until 1 + 2 s; second: a failure due at 4 s is its last moment. Together 7 s."""
    first = [GOOD, replace(GOOD, at_s=0.0, tpot_ms=80.0)]
    second = [replace(GOOD, at_s=0.5), replace(GOOD, at_s=4.0, ttft_ms=None, e2e_ms=None, error="refused")]
    s = summarise([first, second], OBJECTIVE)
    assert (s.requests, s.completed, s.failed, s.good) == (4, 3, 1, 2)
    assert s.goodput == 0.5
    assert s.goodput_per_s == pytest.approx(2 / 7)
    assert s.tokens_per_s == pytest.approx(15 / 7)
    assert (s.ttft_p50, s.tpot_p50, s.gap_p99) == (400.0, 40.0, 50.0)
    assert s.tpot_p99 == pytest.approx(40 + 40 * 0.98)


def test_texts_are_compared_where_both_completed() -> None:
    runs = [[GOOD, replace(GOOD, digest="bb"), replace(GOOD, error="x")]]
    others = [[GOOD, GOOD, GOOD]]
    assert equal_texts(runs, others) == (1, 2)


def report(**change: object) -> ServingReport:
    settings = Settings("m", "chat", "kept texts", "Poisson", "64", "32", 0.0, False, 0, 1, 2, 256, 60.0, 2, OBJECTIVE)
    other = replace(GOOD, **change)  # type: ignore[arg-type]
    runs = [Run("a", 1.0, 0, (GOOD,)), Run("b", 1.0, 0, (other,)), Run("theirs", 1.0, 0, (replace(GOOD, digest="z"),))]
    return ServingReport(settings, ("a", "b"), (*runs, *(replace(run, rate=2.0) for run in runs)))


def test_a_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(report().to_json())
    assert ServingReport.read(path) == report()
    path.write_text('{"runs": []}')
    with pytest.raises(ConfigError, match="no result"):
        ServingReport.read(path)


def test_a_table_has_a_row_for_each_rate_and_setting() -> None:
    page = markdown(grid(report()))
    assert "| 1 | a | 400 / 400 / 400 | 40 / 40 | 50 | 2000 / 2000 | 1.7 | 1/0 | 100% | 0.33 | 1/1 |" in page
    assert [line.split("|")[2].strip() for line in page.splitlines() if line.startswith(("| 1 ", "| 2 "))] == [
        *("a", "b", "theirs"),
        *("a", "b", "theirs"),
    ]
    assert "first token within 500 ms, then at most 50 ms a token" in page


def test_only_our_texts_must_be_equal() -> None:
    assert report().holds
    assert not report(digest="other").holds
    assert report().equal("theirs", 1.0) is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_drawn(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plot.{suffix}"
    plot(report(), path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
