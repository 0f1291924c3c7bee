"""The decode engine step by step, without links, RPCs or threads."""

from __future__ import annotations

import time
from typing import Any

from decode_node.engine.engine import DecodeEngine
from decode_node.engine.reservations import HandoffDeadlines
from decode_node.engine.scheduler import DecodeLimits
from decode_node.stream import EventQueue, Stream
from tests.fakes.nodes import node_config, sequence_request
from tests.fakes.runner import FakeRunner, expected_output


class NoLinks:
    """Every prompt is prefilled here."""

    def cancel(self, link_id: str, ticket: str) -> None:
        raise AssertionError("no hand-off")

    def fail(self, link_id: str, ticket: str, reason: str) -> None:
        raise AssertionError("no hand-off")


class Said(EventQueue):
    """Keeps what the engine said."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.lagging = False

    @property
    def full(self) -> bool:
        return self.lagging

    def push(self, event: Any) -> None:
        self.events.append(event)


def engine_of(runner: FakeRunner) -> DecodeEngine:
    return DecodeEngine(runner.runner, DecodeLimits(4, 4, 8), HandoffDeadlines(10.0, 10.0), {}, NoLinks())


def local_stream(ticket: str = "t0", **changes: Any) -> tuple[Stream, Said]:
    said = Said()
    return Stream(sequence_request(**changes), True, ticket, time.monotonic() + 10.0, said), said


def test_a_step_says_whether_there_was_anything_to_do() -> None:
    """An idle engine that said True would never sleep."""
    engine = engine_of(FakeRunner(node_config()))
    assert not engine.step()
    stream, said = local_stream(num_prompt=20, max_tokens=6)
    engine.submit(stream)
    steps = 0
    while engine.streams:
        assert engine.step()
        steps += 1
        assert steps < 20
    assert steps > 3  # three chunks of the prompt, then rounds
    tokens = [token for event in said.events for token in event.tokens.token_ids]
    assert tokens == expected_output(stream.request)
    assert not engine.step()


def test_lines_and_readers_that_lag_are_nothing_to_do() -> None:
    engine = engine_of(FakeRunner(node_config(kv_cache_tokens=64)))
    holder, lags = local_stream("t0", num_prompt=40, max_tokens=8)
    waiter, _ = local_stream("t1", num_prompt=40, max_tokens=8)
    engine.submit(holder)
    engine.submit(waiter)
    assert (engine.num_waiting, engine.num_running, engine.num_held) == (1, 1, 2)
    lags.lagging = True
    steps = 0
    while engine.step():
        steps += 1
    assert steps == 5  # the prompt's chunks
    assert (engine.num_waiting, engine.num_running) == (1, 1)
    lags.lagging = False
    assert engine.step()


def test_an_idle_engine_checks_its_pool() -> None:
    runner = FakeRunner(node_config())
    engine = engine_of(runner)
    assert not engine.step()
    stream, _ = local_stream(max_tokens=2)
    engine.submit(stream)
    runner.allocator.allocate(1)  # nobody gives it back
    while engine.streams:
        engine.step()
        assert engine.pages.integrity == ""
    assert not engine.step()
    assert engine.pages.integrity
