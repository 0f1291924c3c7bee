"""Nodes come, go, rest and change sides, with processes that are only pretended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from cluster.nodes.admin import AdminService, serve_admin
from cluster.nodes.changes import NodeChanges
from cluster.nodes.listing import node_of
from cluster.nodes.slots import NodeEvent, NotPlaced, Slot
from cluster.nodes.supervise import Supervisor
from cluster.state.registry_types import NodeRecord
from cluster.state.wanted import WantedNode
from paceline.errors import InvalidRequest, NodeUnavailable
from paceline.rpc.identity import Identity
from paceline.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.supervised import Handle, Nodes, changes_of, from_seven, until


class Case:
    """One prefill and two decode nodes."""

    def __init__(self) -> None:
        self.processes, self.room = Nodes(), True
        self.kept: list[list[WantedNode]] = []
        self.supervisor = Supervisor(self.launch, issue=from_seven)
        self.supervisor.want("prefill", 1)
        self.supervisor.want("decode", 2)
        self.changes: NodeChanges = changes_of(self.supervisor, self.kept.append)

    def launch(self, role: str, node_id: str, generation: int) -> Handle:
        if not self.room:
            raise NotPlaced(f"{node_id}: no host")
        return self.processes.launch(role, node_id, generation)

    def state(self, node_id: str) -> str:
        slot = next((slot for slot in self.supervisor.slots if slot.node_id == node_id), None)
        if slot is None:
            return "not there"
        return node_of(slot, self).state

    def nodes(self) -> list[NodeRecord]:
        slots = [slot for slot in self.supervisor.slots if slot.address]
        return [NodeRecord(slot.node_id, slot.role, slot.generation, "host:1") for slot in slots]

    def is_foreign(self, node_id: str, generation: int) -> bool:
        return False

    def handle(self, node_id: str) -> Handle:
        return [handle for handle in self.processes.handles if handle.node_id == node_id][-1]


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    made = Case()
    await made.supervisor.start()
    yield made
    await made.supervisor.stop(0.0)


async def test_a_node_comes_as_soon_as_a_host_has_room_and_delays_no_other(case: Case) -> None:
    """Mutant: an add that fails at once is forgotten."""
    case.room = False
    missing = await case.changes.add("decode", "10.0.0.9")
    await until(lambda: case.state("decode-2") == "failing")
    case.room = True
    await case.changes.add("prefill")
    await until(lambda: case.state("prefill-1") == "ready")
    await until(lambda: case.state("decode-2") == "ready")
    assert (missing.generation >= 7, missing.restarts, missing.last_error) == (True, 0, "")
    wanted = {node.node_id: node for node in case.kept[-1]}
    assert (wanted["decode-2"].host, wanted["decode-2"].resource) == ("10.0.0.9", "of-decode")
    assert sorted(node.cores_slot for node in wanted.values()) == [0, 1, 2, 3, 4]
    case.handle("decode-2").dead = True
    await until(lambda: missing.restarts == 1)  # it is looked after like the others


async def test_a_node_that_ray_takes_no_wish_for_is_not_wanted(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: it stays wanted, without a slot that lists it."""

    def refuse(node: WantedNode) -> None:
        raise RuntimeError("Ray is gone")

    with monkeypatch.context() as patched:
        patched.setattr(case.changes.places, "add", refuse)
        with pytest.raises(RuntimeError, match="Ray is gone"):
            await case.changes.add("decode")
    assert [node.node_id for node in case.kept[-1]] == ["prefill-0", "decode-0", "decode-1"]
    assert (await case.changes.add("decode")).node_id == "decode-2"


async def test_a_node_rests_until_it_is_started_and_its_death_meanwhile_is_nothing(case: Case) -> None:
    old = case.handle("decode-1")
    old.stop_s = 0.2
    slot = await case.changes.drain("decode-1", 3.0)
    await until(lambda: case.state("decode-1") == "draining")
    await until(lambda: case.state("decode-1") == "drained")
    assert (old.stops, slot.address) == ([3.0], "")
    old.dead = True
    await asyncio.sleep(0.2)
    assert len(case.processes.handles) == 3  # nobody replaces it
    with pytest.raises(InvalidRequest, match="decode-0 is the only decode node that serves"):
        await case.changes.remove("decode-0", 0.0)
    with pytest.raises(InvalidRequest, match="drained, or on its way out"):
        await case.changes.switch("decode-1", "prefill", 0.0)
    assert [node.drained for node in case.kept[-1]] == [False, False, True]
    await case.changes.start("decode-1")
    await until(lambda: case.state("decode-1") == "ready")
    assert slot.generation == 8


async def test_a_node_that_does_not_run_takes_no_ones_place(case: Case) -> None:
    """No decode node would serve. Mutant: one that is only wanted counts."""
    case.room = False
    case.handle("decode-1").dead = True
    await until(lambda: case.state("decode-1") == "failing")
    with pytest.raises(InvalidRequest, match="decode-0 is the only decode node"):
        await case.changes.switch("decode-0", "prefill", 0.0)
    case.room = True


async def test_a_node_on_its_way_out_is_not_kept_by_a_drain(case: Case) -> None:
    """It would have a place and be wanted by nobody, until it is removed once more. Mutant: any slot is drained."""
    case.handle("decode-1").stop_s = 0.2
    await case.changes.remove("decode-1", 1.0)
    with pytest.raises(InvalidRequest, match="'decode-1' is none of prefill-0, decode-0"):
        await case.changes.drain("decode-1", 1.0)
    await until(lambda: case.state("decode-1") == "not there")


async def test_a_name_is_free_once_its_place_is_given_back(case: Case) -> None:
    """Else a new node of that name loses the place that it has just been given. Mutant: the name goes first."""
    given_back = threading.Event()

    def on_left(slot: Slot) -> None:
        given_back.wait(5.0)

    case.supervisor.on_left = on_left
    await case.changes.remove("decode-1", 0.0)
    await until(lambda: case.state("decode-1") in ("gone", "not there"))
    await asyncio.sleep(0.1)
    assert (await case.changes.add("decode")).node_id == "decode-2"
    given_back.set()
    await until(lambda: case.state("decode-1") == "not there")


async def test_a_node_that_leaves_is_gone_and_its_name_is_free(case: Case) -> None:
    await case.changes.remove("decode-0", 1.5)
    with pytest.raises(InvalidRequest, match="none of prefill-0, decode-1"):
        await case.changes.start("decode-0")
    await until(lambda: case.state("decode-0") == "not there")
    assert case.handle("decode-0").stops == [1.5]
    await until(lambda: case.changes.places.left == ["decode-0"])  # type: ignore[attr-defined]
    await case.changes.add("decode")
    await until(lambda: case.state("decode-0") == "ready")


async def test_what_cannot_be_kept_is_not_done(case: Case) -> None:
    """Else the next supervisor would undo it. Mutant: the wish is set before it is kept."""

    def keep(wanted: list[WantedNode]) -> None:
        raise NodeUnavailable("Redis takes no writes")

    case.changes.keep = keep
    acts = [case.changes.add("decode"), case.changes.drain("decode-0", 0.0), case.changes.remove("decode-0", 0.0)]
    for act in [*acts, case.changes.switch("prefill-0", "decode", 0.0)]:
        with pytest.raises(NodeUnavailable, match="takes no writes"):
            await act
    assert {case.state(name) for name in ("prefill-0", "decode-0", "decode-1")} == {"ready"}
    assert len(case.supervisor.slots) == 3
    await case.supervisor.stand_down("process 7 on elsewhere")
    with pytest.raises(NodeUnavailable, match="another process supervises"):
        await case.changes.add("decode")


async def test_a_change_is_made_as_a_whole_though_its_caller_leaves(case: Case) -> None:
    """Else a node is wanted that nobody starts, lists or can remove. Mutant: the caller's end cancels the change."""
    kept, goes_on = threading.Event(), threading.Event()

    def keep(wanted: list[WantedNode]) -> None:
        kept.set()
        goes_on.wait(5.0)

    case.changes.keep = keep
    server = await serve_admin(AdminService(case.changes, case, 1.0), "127.0.0.1:0", Identity("router"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = admin_pb2_grpc.AdminStub(channel).AddNode(admin_pb2.AddNodeRequest(role="decode"))
        asked = asyncio.ensure_future(call.read())
        await asyncio.to_thread(kept.wait, 5.0)
        call.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await asyncio.sleep(0.1)  # the server hears of it
        goes_on.set()
        await until(lambda: case.state("decode-2") == "ready")
        assert [slot.node_id for slot in case.supervisor.slots][-1] == "decode-2"
    await server.stop()


async def test_who_waits_for_a_node_hears_that_it_fails_again_and_again(case: Case) -> None:
    """As ``paceline nodes upgrade`` does. It is tried on, and counts anew when it is started anew. Mutants: nobody
    counts; failures of before count; a process that dies at once is no failure."""
    slot = await case.changes.drain("decode-1", 0.0)
    await until(lambda: case.state("decode-1") == "drained")
    case.room = False
    server = await serve_admin(AdminService(case.changes, case, 1.0), "127.0.0.1:0", Identity("router"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        asked = admin_pb2.StartNodeRequest(node_id="decode-1", most_failures=2)
        call = admin_pb2_grpc.AdminStub(channel).StartNode(asked, timeout=5.0)
        with pytest.raises(grpc.aio.AioRpcError, match="times in a row, and is tried again and again"):
            _ = [told async for told in call]
    await server.stop()
    assert slot.failures >= 2
    case.room = True
    await until(lambda: case.state("decode-1") == "ready")
    failed = slot.failures
    case.handle("decode-1").dead = True
    await until(lambda: slot.failures == failed + 1)
    await until(lambda: case.state("decode-1") == "ready")
    await case.changes.drain("decode-1", 0.0)
    assert (await case.changes.start("decode-1")).failures == 0


# ---- roles


async def test_a_node_changes_sides_by_drain_and_restart() -> None:
    nodes, events = Nodes(), list[NodeEvent]()
    supervisor = Supervisor(nodes.launch, events.append, issue=from_seven)
    supervisor.want("prefill", 2)
    supervisor.want("decode", 1)
    await supervisor.start()
    old = next(handle for handle in nodes.handles if handle.node_id == "prefill-1")
    slot = await changes_of(supervisor).switch("prefill-1", "decode", 3.0)
    assert (slot.node_id, slot.role, slot.generation, slot.address) == ("prefill-1", "decode", 8, "prefill-1:8")
    assert old.stops == [3.0]
    assert [e.kind for e in events[3:]] == ["stopped", "started"]
    assert (await changes_of(supervisor).switch("prefill-1", "decode", 3.0)).generation == 8  # it is one already
    await changes_of(supervisor).switch("decode-0", "prefill", 3.0)  # there is another decode node now
    nodes.handles[-1].dead = True
    await until(lambda: supervisor.slots[2].generation == 9)
    assert supervisor.slots[2].role == "prefill"  # it dies and comes back in its new role
    await supervisor.stop(0.0)


@pytest.mark.parametrize(
    ("node_id", "role", "field_", "said"),
    [
        ("decode-7", "prefill", "node_id", "none of prefill-0, decode-0"),
        ("prefill-0", "router", "role", "neither prefill nor decode"),
        ("decode-0", "prefill", "role", "only decode node"),
    ],
)
async def test_switches_that_are_refused(node_id: str, role: str, field_: str, said: str) -> None:
    nodes = Nodes()
    supervisor = Supervisor(nodes.launch, issue=from_seven)
    supervisor.want("prefill", 1)
    supervisor.want("decode", 1)
    await supervisor.start()
    with pytest.raises(InvalidRequest, match=said) as refused:
        await changes_of(supervisor).switch(node_id, role, 1.0)
    assert refused.value.field == field_
    assert not any(handle.stops for handle in nodes.handles)
    await supervisor.stop(0.0)


async def test_two_switches_at_once_leave_a_decode_node() -> None:
    nodes = Nodes()
    supervisor = Supervisor(nodes.launch, issue=from_seven)
    supervisor.want("decode", 2)
    await supervisor.start()
    changes = changes_of(supervisor)
    both = [changes.switch(f"decode-{i}", "prefill", 1.0) for i in range(2)]
    ended = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(each).__name__ for each in ended) == ["InvalidRequest", "Slot"]
    assert sorted(slot.role for slot in supervisor.slots) == ["decode", "prefill"]
    await supervisor.stop(0.0)


async def test_a_switch_whose_start_fails_is_tried_again_in_the_new_role() -> None:
    nodes, launched = Nodes(), list[str]()
    nodes.failures[2] = NodeUnavailable("no memory")

    def launch(role: str, node_id: str, generation: int) -> Handle:
        launched.append(role)
        return nodes.launch(role, node_id, generation)

    supervisor = Supervisor(launch, issue=from_seven)
    supervisor.want("decode", 2)
    await supervisor.start()
    with pytest.raises(NodeUnavailable, match="no memory"):
        await changes_of(supervisor).switch("decode-1", "prefill", 1.0)
    await until(lambda: len(launched) == 4 and supervisor.slots[1].address == "decode-1:9")
    assert launched == ["decode", "decode", "prefill", "prefill"]
    await supervisor.stop(0.0)


def test_a_node_is_silent_once_it_had_a_lease() -> None:
    """Before its first lease is read it starts; "silent" would read like a fault."""
    view = Case()
    view.nodes = list  # type: ignore[method-assign]
    slot = Slot("decode", "decode-0", 1)
    slot.adopt(Handle("decode-0", 1), 1, "host:1", 5.0)
    assert node_of(slot, view).state == "starting"
    slot.leased_at = 6.0
    assert node_of(slot, view).state == "silent"
