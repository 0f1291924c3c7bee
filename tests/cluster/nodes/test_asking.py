"""A node without lease is asked twice over: its process by Ray, which is pretended, and its server by real gRPC."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

import grpc.aio
import pytest
from ray.exceptions import ActorDiedError, RayActorError

from cluster.nodes import addresses, launch
from cluster.nodes.host import STOP_MARGIN_S
from cluster.nodes.launch import RayNode
from cluster.nodes.ray_session import start_ray
from paceline.errors import NodeUnavailable
from paceline.v1 import node_pb2, node_pb2_grpc


class Server(node_pb2_grpc.DecodeNodeServicer):
    """What is asked of a node's gRPC server."""

    Decode = Handoff = Pair = Trace = None  # type: ignore[assignment]

    async def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusResponse:
        return node_pb2.StatusResponse()


class Reference(Future[Any]):
    """An answer that may come; like Ray's, it outlives whoever waited for it."""

    def future(self) -> Future[Any]:
        """What one waits for."""
        waited: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            if not waited.cancelled():
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
    waited: list[float] = []

    def get(reference: Reference, timeout_s: float) -> str:
        waited.append(timeout_s)
        return "host:1"

    monkeypatch.setattr(launch, "get", get)
    assert RayNode("decode-0", "decode", 1, Actor()).start() == "host:1"
    assert RayNode("decode-0", "decode", 1, Actor(), start_timeout_s=1800.0).start() == "host:1"
    assert waited == [300.0 + STOP_MARGIN_S, 1800.0 + STOP_MARGIN_S]


def test_a_node_that_another_supervisor_watched_has_not_died(node: RayNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was stopped, and is let go on, watches again. Mutants: the end of its call is the node's; it watches no
    more."""
    monkeypatch.setattr("cluster.nodes.launch.ray.get", lambda reference: reference.result())
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
