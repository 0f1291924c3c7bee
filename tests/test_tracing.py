"""The recorder's bounds, and the timeline file."""

from __future__ import annotations

import json
import time

import pytest

from paceline import tracing
from paceline.results import RequestTrace, TraceEvent
from paceline.trace_file import chrome_trace
from paceline.tracing import MAX_EVENTS, NO_TRACE, Recorder
from paceline.wire import trace_from_proto, trace_to_proto


def test_the_oldest_sequence_gives_way() -> None:
    recorder = Recorder(2)
    for name in "abc":
        recorder.open(name, "decode").record("queued")
    assert [len(recorder.read(name, "n").events) for name in "abc"] == [0, 1, 1]


def test_overflow_is_counted() -> None:
    recorder = Recorder(1)
    trace = recorder.open("a", "decode")
    for _ in range(MAX_EVENTS + 7):
        trace.record("round")
    found = recorder.read("a", "n")
    assert (len(found.events), found.dropped) == (MAX_EVENTS, 7)


def test_what_is_told_of_many_sequences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first events of all. Mutants: the first sequence's alone; what is left out is not counted."""
    monkeypatch.setattr(tracing, "MAX_TOLD_EVENTS", 4)
    recorder = Recorder(10)
    for choice in range(3):
        trace = recorder.open(f"a#{choice}", "decode")
        for at in range(3):
            trace.record("round", start_s=10.0 * at + choice)
    found = recorder.read("a", "n")
    assert [event.sequence for event in found.events] == ["a#0", "a#1", "a#2", "a#0"]
    assert found.dropped == 5


def test_the_total_is_bounded_but_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_TOTAL_EVENTS", 10)
    recorder = Recorder(100)
    for name in "abc":
        trace = recorder.open(name, "decode")
        for _ in range(6):
            trace.record("round")
    recorder.open("d", "decode").record("round")
    assert [len(recorder.read(name, "n").events) for name in "abcd"] == [0, 0, 6, 1]


def test_off_keeps_nothing() -> None:
    recorder = Recorder(0)
    trace = recorder.open("a", "decode")
    assert trace is NO_TRACE
    assert trace.on("receive") is NO_TRACE
    trace.record("round", 0.0, 1.0, accepted=2)
    assert recorder.read("a", "n") == RequestTrace("a")


def test_times_are_unix_and_attempts_are_counted() -> None:
    recorder = Recorder(4)
    recorder.open("a", "decode").record("queued", time.monotonic() - 5, time.monotonic() - 3)
    recorder.open("a", "decode").on("receive").record("ready")
    first, second = recorder.read("a", "n").events
    assert first.start_s == pytest.approx(time.time() - 5, abs=0.5)
    assert first.end_s is not None
    assert first.end_s - first.start_s == pytest.approx(2, abs=1e-3)
    assert [(e.track, e.attempt) for e in (first, second)] == [("decode", 1), ("receive", 2)]


def test_a_request_is_all_its_choices_and_no_other() -> None:
    recorder = Recorder(9)
    for name in ("a", "a#0", "a#12", "a#x", "ab", "a#"):
        recorder.open(name, "decode").record("queued")
    assert {event.sequence for event in recorder.read("a", "n").events} == {"a", "a#0", "a#12"}


def test_long_texts_are_cut() -> None:
    recorder = Recorder(1)
    recorder.open("a", "decode").record("failed", reason="x" * 10_000)
    reason = recorder.read("a", "n").events[0].attributes["reason"]
    assert isinstance(reason, str)
    assert len(reason) == tracing.MAX_TEXT


def test_wire_and_file() -> None:
    events = (
        TraceEvent("router", "request", "a", 1, "request", 100.0, 101.0, {"status": "ok"}),
        TraceEvent("decode-0", "decode", "a", 2, "round", 100.25, 100.5, {"accepted": 3.0}),
        TraceEvent("decode-0", "receive", "a", 2, "hand-off ready", 100.25),
    )
    trace = RequestTrace("a", events, ("prefill-0",), 4)
    assert trace_from_proto("a", trace_to_proto(trace)) == trace
    made = json.loads(json.dumps(chrome_trace(trace)))
    named = {(e["name"], e["args"]["name"]) for e in made["traceEvents"] if e["ph"] == "M"}
    assert named == {
        ("process_name", "router"),
        ("process_name", "decode-0"),
        ("thread_name", "request a"),
        ("thread_name", "decode a (attempt 2)"),
        ("thread_name", "receive a (attempt 2)"),
    }
    spans = {e["name"]: (e["ts"], e["dur"]) for e in made["traceEvents"] if e["ph"] == "X"}
    assert spans == {"request": (0, 1_000_000), "round": (250_000, 250_000)}
    assert [e["name"] for e in made["traceEvents"] if e["ph"] == "i"] == ["hand-off ready"]
    assert made["otherData"]["silent_nodes"] == ["prefill-0"]
    assert made["otherData"]["dropped_events"] == 4


def test_an_empty_trace_is_an_empty_file() -> None:
    assert chrome_trace(RequestTrace("a"))["traceEvents"] == []


def test_a_sequence_is_told_to_its_owner_alone() -> None:
    """Two requests may have one id. Mutants: what the first one left is told with the second one's, or is forgotten."""
    recorder = Recorder(4)
    recorder.open("job#0", "decode", "acme").record("queued")
    recorder.open("job#1", "decode", "other").record("queued")
    assert [event.sequence for event in recorder.read("job", "n", "acme").events] == ["job#0"]
    assert len(recorder.read("job", "n").events) == 2  # an operator sees both
    recorder.open("job#0", "decode", "other").record("finished")
    assert [event.name for event in recorder.read("job", "n", "acme").events] == ["queued"]
    assert [event.name for event in recorder.read("job", "n", "other").events] == ["queued", "finished"]
    assert [event.name for event in recorder.read("job", "n").events] == ["queued", "finished"]  # the latest of each
    recorder.open("job#0", "decode", "acme").record("again")
    assert [event.name for event in recorder.read("job", "n").events] == ["queued", "queued", "again"]
