"""A node without lease is asked twice over: its process by Ray, which is pretended, and its server by real gRPC."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio
import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

from cluster.nodes import addresses, launch
from cluster.nodes.host import START_TIMEOUT_S, STOP_MARGIN_S
from cluster.nodes.launch import RayNode
from cluster.nodes.ray_session import start_ray
from paceline.errors import NodeUnavailable
from paceline.v1 import node_pb2, node_pb2_grpc
from tests.fakes.supervised import REAL_LIMIT_S, Case


class Server(node_pb2_grpc.DecodeNodeServicer):
    """What is asked of a node's gRPC server."""

    Decode = Handoff = Pair = Trace = Recall = None  # type: ignore[assignment]

    async def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusResponse:
        return node_pb2.StatusResponse()


class Reference(Future[Any]):
    """An answer that may come; like Ray's, it outlives whoever waited for it."""

    def future(self) -> Future[Any]:
        """What one waits for."""
        waited: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            if waited.cancelled():
                return
            if (error := done.exception()) is not None:
                waited.set_exception(error)
            else:
                waited.set_result(done.result())

        self.add_done_callback(pass_on)
        return waited


class Actor:
    """A node's process: answers when ``answer`` is there."""

    def __init__(self) -> None:
        self.asked: list[Reference] = []
        self.answer: dict[str, Any] | None = None
        self.start = self.status = self.wait_stopped = self

    def remote(self) -> Reference:
        reference = Reference()
        self.asked.append(reference)
        if self.answer is not None:
            reference.set_result(self.answer)
        return reference


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    node_pb2_grpc.add_DecodeNodeServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> RayNode:
    def done(references: list[Reference], timeout: float) -> tuple[list[Reference], list[Reference]]:
        return [each for each in references if each.done()], []

    monkeypatch.setattr("cluster.nodes.launch.ray.wait", done)
    monkeypatch.setattr(launch, "ASK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(addresses, "ANSWER_TIMEOUT_S", 0.2)
    return RayNode("decode-0", "decode", 1, Actor())


@pytest.mark.parametrize(
    ("status", "answers"),
    [({}, True), ({"alive": False}, False), ({"fenced": True}, False), ({"address": "silent"}, False)],
)
async def test_both_must_answer_and_the_engine_must_tick(
    node: RayNode, address: str, status: dict[str, Any], answers: bool
) -> None:
    with socket.socket() as silent:  # as of a process that is stopped: the kernel takes connections
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        known = {"alive": True, "fenced": False, "address": address, "pid": os.getpid(), "hostname": "here"}
        node._actor.answer = known | status
        if status.get("address"):
            node._actor.answer["address"] = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await node.answers() is answers


async def test_a_silent_process_has_one_question_waiting_and_its_late_answer_is_not_taken(
    node: RayNode, address: str
) -> None:
    actor = node._actor
    before = len(actor.asked)  # it is watched
    for _ in range(3):
        assert not await node.answers()
    assert len(actor.asked) == before + 1
    actor.asked[-1].set_result({"alive": True, "fenced": False, "address": address})
    assert not await node.answers()
    assert len(actor.asked) == before + 2


def test_a_ray_cluster_where_nobody_listens_is_refused_at_once() -> None:
    """Ray itself tries for minutes."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        nobody = f"127.0.0.1:{one.getsockname()[1]}"
    with pytest.raises(NodeUnavailable, match=rf"cannot join the Ray cluster at {nobody} .*Connection refused"):
        start_ray(nobody)


@pytest.mark.parametrize(
    ("last", "told", "logged"),
    [("paceline.errors.ConfigError: node_interface: no eth9", "ConfigError: node_interface: no eth9", False),
     ("KeyError: 'x'", "KeyError: 'x'", True)],
)  # fmt: skip
def test_what_a_node_raised_while_it_was_made_is_one_line(
    last: str, told: str, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    died = ActorDiedError()
    died.error_msg, died._actor_init_failed = f"The actor died because of\n  File ...\n{last}\n", True
    assert RayNode("prefill-0", "prefill", 1, Actor())._reason(died) == told
    assert bool(caplog.records) == logged


def test_a_start_has_the_time_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a node on a CPU may hang for as long as a GPU's kernels take to compile."""
    for kind, limit_s in START_TIMEOUT_S.items():
        node, clock = starting(monkeypatch, kind, says_something_after_s=0.0, starts_after_s=math.inf)
        with pytest.raises(NodeUnavailable, match=f"did not start within {limit_s + STOP_MARGIN_S:g} s"):
            node.start()
        assert clock.now == limit_s + STOP_MARGIN_S


@pytest.mark.parametrize(("kind", "silent_s"), [("cpu", 120.0), ("cuda", 300.0)])
def test_a_start_that_says_nothing_is_given_up(kind: str, silent_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that imports for long, then loads for long, is not. Mutants: it is waited for; it has that time as a whole,
    whatever it says."""
    node, clock = starting(monkeypatch, kind, says_something_after_s=math.inf, starts_after_s=math.inf)
    with pytest.raises(NodeUnavailable, match=f"said nothing for {silent_s:g} s"):
        node.start()
    assert clock.now == silent_s
    node, clock = starting(monkeypatch, kind, says_something_after_s=silent_s - 2, starts_after_s=2 * silent_s)
    assert node.start() == "host:1"
    assert clock.now == 2 * silent_s


class Passing:
    """Time that passes while a start is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def starting(
    monkeypatch: pytest.MonkeyPatch, kind: str, *, says_something_after_s: float, starts_after_s: float
) -> tuple[RayNode, Passing]:
    """A node whose start is waited for on a pretended clock."""
    actor, clock = Actor(), Passing()
    node = RayNode("decode-0", "decode", 1, actor, kind=kind)

    def get(reference: Reference, timeout_s: float) -> str:
        clock.now += timeout_s
        if clock.now >= starts_after_s:
            return "host:1"
        if clock.now >= says_something_after_s and not actor.asked[-1].done():
            actor.asked[-1].set_result({})
        raise GetTimeoutError

    monkeypatch.setattr(launch, "get", get)
    monkeypatch.setattr(launch, "time", clock)
    monkeypatch.setattr(launch, "_is_there", Reference.done)
    return node, clock


def test_a_node_that_another_supervisor_watched_has_not_died(node: RayNode) -> None:
    """Who was stopped, and is let go on, watches again. Mutants: the end of its call is the node's; it watches no
    more."""
    actor = node._actor
    actor.asked[-1].set_result(False)
    assert not node.died()
    assert len(actor.asked) == 2
    assert not node.died()
    actor.asked[-1].set_exception(RayActorError())
    assert node.died()
    stopped = RayNode("decode-0", "decode", 1, actor)
    actor.asked[-1].set_result(True)
    assert stopped.died()


async def test_nobody_is_being_asked_once_the_supervisor_has_stood_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: ``Supervisor._stop_watching`` waits for none of the tasks that it cancels."""
    case, asked, over = Case(), asyncio.Event(), asyncio.Event()

    async def answers() -> bool:
        asked.set()
        try:
            return await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # a thread that is under way, as in RayNode
            over.set()

    await case.supervisor.start()
    monkeypatch.setattr(case.nodes.handles[0], "answers", answers)
    case.leased = False
    await asyncio.wait_for(asked.wait(), REAL_LIMIT_S)
    await case.supervisor.stand_down("process 7 on elsewhere")
    assert over.is_set()
