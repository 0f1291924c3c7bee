"""The prefill engine step by step, without a link, RPCs or threads."""

from __future__ import annotations

import time
from typing import Any

import torch

from kv_transfer.handoff.block import DRAFT_KV, META, TARGET_KV, ByteClass
from paceline.errors import HandoffFailed
from paceline.results import TraceEvent
from paceline.tracing import Recorder
from paceline.v1 import handoff_pb2
from prefill_node.engine.engine import PrefillEngine
from prefill_node.engine.scheduler import PrefillLimits
from prefill_node.job import PrefillJob
from tests.fakes.nodes import node_config, sequence_request
from tests.fakes.runner import FakeRunner

SENDING_S = 0.25


class OpenLink:
    """Takes everything; says what was sent."""

    def groups(self, layers: range, num_tokens: int) -> tuple[range, ...]:
        return (layers,)

    def begin(self, ticket: str, *where: Any) -> None:
        pass

    def rows(self, ticket: str, *what: Any) -> None:
        pass

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        pass

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        pass

    def abort(self, ticket: str, reason: str) -> None:
        pass

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        return {TARGET_KV: 1000, DRAFT_KV: 100, META: 10}

    def sending_s(self, ticket: str) -> float:
        return SENDING_S

    def lost(self, reason: str) -> None:
        raise AssertionError("the link holds")


class One:
    """An engine with one job."""

    def __init__(self, num_prompt: int = 20) -> None:
        self.runner = FakeRunner(node_config())
        self.engine = PrefillEngine(self.runner.runner, PrefillLimits(8, 4, 4), 10.0)
        self.said: list[Any] = []
        self._recorder = Recorder(4)
        request = sequence_request(num_prompt=num_prompt)
        trace = self._recorder.open(request.request_id, "prefill")
        self.job = PrefillJob(request, "t0", 0, OpenLink(), time.monotonic() + 10.0, self.said.append, trace)
        self.engine.submit(self.job)

    def exposed(self) -> list[TraceEvent]:
        events = self._recorder.read(self.job.request.request_id, "prefill-0").events
        return [event for event in events if event.name == "exposed transfer"]


def test_a_step_says_whether_there_was_anything_to_do() -> None:
    one = One(num_prompt=20)
    assert [one.engine.step() for _ in range(4)] == [True, True, True, False]
    assert (one.engine.num_running, one.engine.num_waiting, one.engine.num_held) == (1, 0, 1)


def test_an_idle_engine_checks_its_pool() -> None:
    one = One()
    one.runner.allocator.allocate(1)  # nobody gives it back
    while one.engine.step():
        pass
    assert one.engine.pages.integrity == ""  # its job still holds pages
    one.engine.handoff_ended("t0", None, time.monotonic())
    one.engine.step()
    assert one.engine.pages.integrity


def test_the_exposed_transfer_is_from_the_first_token_to_the_hand_offs_end() -> None:
    one = One()
    while one.engine.step():
        pass
    one.engine.handoff_ended("t0", None, one.job.computed_at + 2.5)
    (event,) = one.exposed()
    assert event.end_s is not None
    assert abs(event.end_s - event.start_s - 2.5) < 1e-5
    assert event.attributes["transfer_s"] == SENDING_S
    handed_off = one.said[-1].handed_off
    assert abs(handed_off.exposed_s - 2.5) < 1e-5
    assert handed_off.transfer_s == SENDING_S
    sent = handed_off.bytes
    assert (sent.target_kv, sent.draft_kv, sent.hidden, sent.meta) == (1000, 100, 0, 10)


def test_a_hand_off_that_failed_while_the_last_chunk_was_computed_exposes_nothing() -> None:
    """Its end was noted before the first token, and takes effect after it."""
    one = One()
    while one.engine.step():
        pass
    one.engine.handoff_ended("t0", "the link was lost", one.job.computed_at - 1.0)
    (event,) = one.exposed()
    assert event.end_s == event.start_s
    assert isinstance(one.said[-1], HandoffFailed)


def test_a_hand_off_that_failed_before_the_first_token_exposes_nothing() -> None:
    one = One()
    assert one.engine.step()
    one.engine.handoff_ended("t0", "the link was lost", time.monotonic())
    assert one.exposed() == []
    assert [type(event) for event in one.said] == [HandoffFailed]
    assert not one.engine.step()
    assert one.engine.pages.free_pages == one.runner.allocator.num_pages
    assert one.engine.pages.integrity == ""
