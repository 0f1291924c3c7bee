"""The hand-off benchmark: what it reads off traces, its bounds, its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.handoff.report import (
    Crossing,
    HandoffReport,
    HandoffSettings,
    Move,
    Repetition,
    crossing,
    handoff_grid,
    last_received_s,
)
from paceline.errors import ConfigError, PacelineError
from paceline.results import TraceEvent

MB = 1_000_000


def event(track: str, name: str, start: float, end: float | None = None, **attributes: float) -> TraceEvent:
    return TraceEvent("node", track, "request", 1, name, start, end, dict(attributes))


def message(send: float, sent: float, receive: float, received: float, first: int, tokens: int) -> list[TraceEvent]:
    size = {"num_bytes": 100.0 * tokens, "first_token": float(first), "num_tokens": float(tokens)}
    return [
        event("send", "chunk sent", send, sent, **size),
        event("receive", "chunk received", receive, received, **size),
    ]


EVENTS = [
    event("prefill", "chunk", 0.0, 1.0),
    event("prefill", "chunk", 1.0, 2.5),
    event("send", "begin sent", 0.4, 0.4),
    *message(0.5, 0.6, 0.55, 0.7, 0, 8),
    *message(0.65, 0.8, 0.7, 0.9, 8, 8),
    event("prefill", "first token", 2.5),
    *message(2.6, 2.7, 2.7, 2.8, 16, 4),
    event("send", "state sent", 2.8, 2.8, num_bytes=0.0),
    event("receive", "state received", 2.85, 2.85, num_bytes=0.0),
    event("receive", "hand-off ready", 2.9),
]


def test_a_crossing_is_read_off_both_traces() -> None:
    found = crossing(EVENTS, 0.6)
    assert found.prefill_s == 2.5
    assert found.exposed_s == pytest.approx(0.4)
    assert found.acknowledged_s == 0.6
    assert found.sizes == (800, 800, 400)
    assert found.num_bytes == 2000
    assert found.sending_s == pytest.approx(0.1 + 0.15 + 0.1)


def test_when_the_last_row_was_written() -> None:
    assert last_received_s(EVENTS) == 2.8
    with pytest.raises(PacelineError, match="no messages"):
        last_received_s(EVENTS[:3])


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (2.7, "2 chunks, 3 messages sent, 2 received, 1 first tokens, 1 hand-offs ready"),
        (2.5, "2 chunks, 3 messages sent, 3 received, 0 first tokens, 1 hand-offs ready"),
        (2.9, "2 chunks, 3 messages sent, 3 received, 1 first tokens, 0 hand-offs ready"),
    ],
)
def test_traces_that_do_not_fit_together_are_refused(missing: float, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        crossing([e for e in EVENTS if e.start_s != missing], 0.6)


def report(exposed_s: float, moved_s: float) -> HandoffReport:
    overlapped = Crossing(1.0, exposed_s, 2 * exposed_s, 0.1, (MB, MB))
    return HandoffReport(HandoffSettings("m"), (Repetition(overlapped, 0.05, Move(moved_s, (2 * MB,)), 0.04),) * 3)


def test_bounds() -> None:
    good = report(0.00995, 0.0499)
    assert good.exposed_share == pytest.approx(0.199)
    assert good.rate_share == pytest.approx(0.8016, abs=1e-4)
    assert good.holds
    assert not report(0.01005, 0.0499).holds
    assert not report(0.00995, 0.0501).holds
    cells = {row[0]: row[1:] for row in handoff_grid(good).rows}
    assert cells["exposed / floor"] == ("19.9%", "<= 20%: holds")
    assert cells["exposed / sender busy"] == ("10.0%", "")
    assert cells["its share of the floor"] == ("39.8%", "")
    assert cells["raw gloo copy of the same: the floor"] == ("50.00 ms = 0.04 GB/s", "")
    missed = {row[0]: row[2] for row in handoff_grid(report(0.03, 0.05)).rows}
    assert missed["exposed / floor"] == "<= 20%: MISSED"


@pytest.mark.parametrize(
    ("repeats", "launches", "shares"), [(1, 5, [1]), (7, 5, [1, 1, 2, 1, 2]), (15, 5, [3] * 5), (4, 1, [4])]
)
def test_launches_share_the_repetitions(repeats: int, launches: int, shares: list[int]) -> None:
    assert HandoffSettings("m", repeats=repeats, launches=launches).shares() == shares


def test_results_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(report(0.02, 0.05).to_json())
    assert HandoffReport.read(path) == report(0.02, 0.05)
    path.write_text(json.dumps({"settings": {}}))
    with pytest.raises(ConfigError, match="no result of this benchmark"):
        HandoffReport.read(path)
