"""Node processes that are only pretended, and a supervisor on a pretended clock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.nodes.changes import NodeChanges
from cluster.nodes.slots import NodeEvent
from cluster.nodes.supervise import POLL_S, Supervisor
from cluster.state.wanted import WantedNode

REAL_LIMIT_S = 5.0


@dataclass
class Handle:
    """A node process as a test wants it."""

    node_id: str
    generation: int
    failure: Exception | None = None  # what start raises
    dead: bool = False
    ticks: bool = False  # a node that is asked has no lease: most are wedged
    stop_s: float = 0.0
    beside: threading.Barrier | None = None  # others that must stop at the same time
    killed: threading.Event = field(default_factory=threading.Event)
    stops: list[float] = field(default_factory=list)

    def start(self) -> str:
        if self.failure is not None:
            raise self.failure
        return f"{self.node_id}:{self.generation}"

    def died(self) -> bool:
        return self.dead

    async def answers(self) -> bool:
        return self.ticks

    def stop(self, grace_s: float) -> None:
        self.stops.append(grace_s)
        if self.beside is not None:
            self.beside.wait(REAL_LIMIT_S)
        self.killed.wait(self.stop_s)

    def kill(self) -> None:
        self.killed.set()


class Clock:
    """Time that passes only by sleeping; for one slot at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if seconds != POLL_S:
            self.slept.append(seconds)
        await asyncio.sleep(0.001)  # so that no test sees more than a few of the polls at once


class Nodes:
    """Launches handles and keeps them, newest last."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.failures: dict[int, Exception] = {}  # by number of the launch

    def launch(self, role: str, node_id: str, generation: int) -> Handle:
        handle = Handle(node_id, generation, self.failures.get(len(self.handles)))
        self.handles.append(handle)
        return handle


def from_seven(node_id: str, above: int) -> int:
    """A registry that has issued six generations of every node."""
    return max(above, 6) + 1


class Places:
    """Room for every node; says who left."""

    def __init__(self) -> None:
        self.left: list[str] = []

    def add(self, node: WantedNode) -> None:
        pass

    def remove(self, node_id: str) -> None:
        self.left.append(node_id)

    def check_fits(self, node: WantedNode) -> None:
        pass


def changes_of(supervisor: Supervisor, keep: Callable[[list[WantedNode]], None] = lambda wanted: None) -> NodeChanges:
    """What operators change. keep: takes what the next supervisor is to know."""
    wanted = [WantedNode(slot.node_id, slot.role, cores_slot=n) for n, slot in enumerate(supervisor.slots)]
    resources = {role: f"of-{role}" for role in ("prefill", "decode")}
    return NodeChanges(supervisor, Places(), wanted, keep, resources)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + REAL_LIMIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.002)


class Case:
    """One supervised decode node on a pretended clock."""

    def __init__(self) -> None:
        self.nodes, self.clock = Nodes(), Clock()
        self.events: list[NodeEvent] = []
        self.leased = True  # the first generation; later ones always are
        self.supervisor = Supervisor(
            self.nodes.launch,
            on_event=self.events.append,
            has_lease=lambda node_id, generation: self.leased or generation > 1,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.supervisor.want("decode", 1)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]

    async def handle(self, index: int) -> Handle:
        """The handle of the ``index``-th launch, once it is started."""
        await until(lambda: sum(kind == "started" for kind in self.kinds) > index - len(self.nodes.failures))
        return self.nodes.handles[index]
