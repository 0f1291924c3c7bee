"""The process that waits to be a node's next generation; Ray is only pretended."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.nodes import places
from cluster.nodes.bundles import Wanted
from cluster.nodes.launch import RayNode, RayNodes
from cluster.nodes.ray_session import SESSION
from cluster.state.registry_types import Registry
from paceline.config import NodeConfig

CONFIG = NodeConfig(model="tiny")


class Group:
    """A placement group that is there."""

    id = "group"

    def wait(self, timeout_s: float) -> bool:
        return True


@dataclass
class Process:
    """A launched process; starts as RayNode does."""

    node_id: str
    generation: int
    role: str = "decode"
    dead: bool = False
    killed: bool = False
    on_started: Any = None
    silent_s: float = 120.0

    def start(self) -> str:
        self.on_started()
        return f"{self.node_id}:{self.generation}"

    def died(self) -> bool:
        return self.dead

    def kill(self) -> None:
        self.killed = True


@dataclass
class Case:
    """Nodes of one deployment and the processes made for them."""

    nodes: RayNodes
    made: list[Process] = field(default_factory=list)

    def launch(self, node_id: str, generation: int, role: str = "decode") -> Any:
        return self.nodes.launch(role, node_id, generation, CONFIG)


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(places, "placement_group", lambda bundles, strategy, name, lifetime: Group())
    monkeypatch.setattr(places, "remove_placement_group", lambda group: None)
    wanted = [Wanted("decode-0", standby=True), Wanted("decode-1")]
    made = Case(RayNodes(wanted, Registry("redis://nowhere", 2.0)))

    def process(role: str, node_id: str, generation: int, config: NodeConfig, *, outlives: bool = True) -> Process:
        made.made.append(Process(node_id, generation, role, on_started=lambda: None))
        return made.made[-1]

    monkeypatch.setattr(made.nodes, "_process", process)
    return made


def test_it_waits_once_the_node_runs_and_becomes_the_next_generation(case: Case) -> None:
    first = case.launch("decode-0", 5)
    assert case.made == [first]
    first.start()
    standby = case.made[1]
    assert standby.generation == 6
    second = case.launch("decode-0", 6)
    assert second is standby
    assert len(case.made) == 2
    second.start()
    assert [process.generation for process in case.made] == [5, 6, 7]


def test_the_first_start_of_a_deployment_may_be_silent_for_long(case: Case) -> None:
    """Imports took two minutes on a machine with a load of 57. Mutants: it has no more time than others; all have."""
    assert case.launch("decode-0", 5).silent_s == math.inf
    case.nodes.patient = False
    assert case.launch("decode-0", 6).silent_s == 120.0


def test_one_that_died_is_not_used(case: Case) -> None:
    case.launch("decode-0", 5).start()
    case.made[1].dead = True
    second = case.launch("decode-0", 6)
    assert second is case.made[2]
    assert second.generation == 6


def test_one_of_another_role_is_not_used(case: Case) -> None:
    case.launch("decode-0", 5).start()
    second = case.launch("decode-0", 6, "prefill")
    assert case.made[1].killed
    assert (second.role, second.generation) == ("prefill", 6)


def test_a_node_without_one_and_the_end(case: Case) -> None:
    case.launch("decode-1", 5).start()
    assert len(case.made) == 1
    case.launch("decode-0", 5).start()
    case.nodes.close()
    assert [process.killed for process in case.made] == [False, False, True]


def test_a_real_node_tells_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: Ray may be left between its answer and the future of it."""
    waits: list[int] = []

    class Reference:
        def future(self) -> Future[bool]:
            waits.append(SESSION._waits)
            return Future()

    class Method:
        def remote(self) -> Reference:
            return Reference()

    class Actor:
        start = status = wait_stopped = Method()

    monkeypatch.setattr("cluster.nodes.launch.ray.get", lambda reference, timeout: "127.0.0.1:1")
    before = SESSION._waits
    told: list[bool] = []
    node = RayNode("decode-0", "decode", 1, Actor())
    assert waits == [before + 1]
    node.on_started = lambda: told.append(True)
    assert node.start() == "127.0.0.1:1"
    assert told == [True]
