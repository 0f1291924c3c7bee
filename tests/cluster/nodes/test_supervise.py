"""Restarts, backoff and bounded stopping, with processes that are only pretended."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.nodes import supervise
from cluster.nodes.slots import MAX_BACKOFF_S, NodeEvent, NotPlaced
from cluster.nodes.supervise import POLL_S, Supervisor
from paceline.errors import NodeUnavailable
from tests.fakes.supervised import REAL_LIMIT_S, Case, Handle, Nodes, changes_of, from_seven, until


@pytest.fixture
def case() -> Case:
    return Case()


async def test_starts_what_is_wanted() -> None:
    nodes, events = Nodes(), list[NodeEvent]()
    supervisor = Supervisor(nodes.launch, events.append, issue=from_seven)
    supervisor.want("prefill", 2)
    supervisor.want("decode", 1)
    await supervisor.start()
    assert [(s.role, s.node_id, s.generation, s.address) for s in supervisor.slots] == [
        ("prefill", "prefill-0", 7, "prefill-0:7"),
        ("prefill", "prefill-1", 7, "prefill-1:7"),
        ("decode", "decode-0", 7, "decode-0:7"),
    ]
    assert sorted((e.kind, e.node_id, e.detail) for e in events) == sorted(
        ("started", s.node_id, s.address) for s in supervisor.slots
    )
    await supervisor.stop(0.0)


async def test_a_dead_node_is_followed_by_its_next_generation(case: Case) -> None:
    await case.supervisor.start()
    (await case.handle(0)).dead = True
    await case.handle(1)
    slot = case.supervisor.slots[0]
    assert (slot.generation, slot.restarts, slot.address) == (2, 1, "decode-0:2")
    assert case.kinds == ["started", "died", "started"]
    assert case.clock.slept == [0.1]
    assert case.nodes.handles[0].killed.is_set()  # what may be left of it
    await case.supervisor.stop(0.0)


async def test_backoff_doubles_to_its_limit_and_never_gives_up(case: Case) -> None:
    case.nodes.failures = {i: NodeUnavailable(f"try {i}") for i in range(1, 12)}
    await case.supervisor.start()
    case.nodes.handles[0].dead = True
    await until(lambda: case.kinds.count("started") == 2)
    waits = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0, 10.0, 10.0, 10.0]
    assert case.clock.slept == pytest.approx(waits)
    failed = [event for event in case.events if event.kind == "start_failed"]
    assert [event.retry_in_s for event in failed] == pytest.approx(waits[1:])
    assert [event.detail for event in failed] == [f"try {i}" for i in range(1, 12)]
    assert [event.generation for event in failed] == list(range(2, 13))
    assert all(handle.killed.is_set() for handle in case.nodes.handles[:-1])
    assert max(case.clock.slept) == MAX_BACKOFF_S
    assert case.supervisor.slots[0].last_error == ""
    await case.supervisor.stop(0.0)


@pytest.mark.parametrize(("life_s", "next_wait_s"), [(9.0, 0.4), (11.0, 0.1)])
async def test_a_long_life_resets_the_backoff(case: Case, life_s: float, next_wait_s: float) -> None:
    await case.supervisor.start()
    for index in range(2):  # 0.1 s, 0.2 s
        (await case.handle(index)).dead = True
    last = await case.handle(2)
    case.clock.now = case.supervisor.slots[0].started_at + life_s
    last.dead = True
    await case.handle(3)
    assert case.clock.slept == pytest.approx([0.1, 0.2, next_wait_s])
    await case.supervisor.stop(0.0)


async def test_a_node_that_lost_its_lease_is_killed_and_replaced(case: Case) -> None:
    await case.supervisor.start()
    lost_at = case.clock.now
    case.leased = False
    await until(lambda: "lease_lost" in case.kinds)
    assert 2.0 <= case.clock.now - lost_at <= 3.0
    await case.handle(1)
    assert case.nodes.handles[0].killed.is_set()
    assert case.kinds == ["started", "lease_lost", "started"]
    assert case.supervisor.slots[0].generation == 2
    await case.supervisor.stop(0.0)


async def test_a_node_that_is_cut_off_is_left_alone_until_its_host_answers(case: Case) -> None:
    answers, asked = False, set[str]()

    async def reachable(address: str) -> bool:
        asked.add(address)
        return answers

    case.supervisor.reachable = reachable
    await case.supervisor.start()
    case.leased = False
    await until(lambda: case.clock.now > 10.0)
    assert case.kinds == ["started", "cut_off"]  # told once
    assert asked == {"decode-0:1"}
    case.leased = True  # it is back, as it was
    now = case.clock.now
    await until(lambda: case.clock.now > now + 3.0)
    assert case.kinds == ["started", "cut_off"]
    assert not case.nodes.handles[0].killed.is_set()
    case.leased, answers = False, True  # it is stopped, on a host that lives
    await case.handle(1)
    assert case.kinds[-2:] == ["lease_lost", "started"]
    assert case.nodes.handles[0].killed.is_set()
    await case.supervisor.stop(0.0)


async def test_a_node_whose_host_could_not_be_asked_is_left_alone(case: Case) -> None:
    """This process has no connection to ask by. Mutants: its host is taken to be cut off, so that a stop kills the node
    without a drain; or to answer, so that the node is killed."""
    answers: bool | None = None

    async def reachable(address: str) -> bool | None:
        return answers

    case.supervisor.reachable = reachable
    await case.supervisor.start()
    case.leased = False
    await until(lambda: case.clock.now > 10.0)
    assert case.kinds == ["started", "not_asked"]  # told once
    answers = False
    await until(lambda: "cut_off" in case.kinds)
    answers = None  # nothing new is known
    now = case.clock.now
    await until(lambda: case.clock.now > now + 3.0)
    assert case.supervisor.slots[0].cut_off
    case.leased = True
    await until(lambda: not case.supervisor.slots[0].cut_off)
    await case.supervisor.stop(10.0)
    assert case.nodes.handles[0].stops == [10.0]
    assert not case.nodes.handles[0].killed.is_set()


@pytest.mark.parametrize("silent_s", [0.5, 1.9, 2.1, 3.9, 30.0])
async def test_a_node_has_a_whole_grace_from_when_its_host_answers(case: Case, silent_s: float) -> None:
    """However long the cut was: a renewal needs a connection first."""

    async def reachable(address: str) -> bool:
        return case.clock.now - lost_at >= silent_s

    case.supervisor.reachable = reachable
    await case.supervisor.start()
    lost_at, case.leased = case.clock.now, False
    await until(lambda: case.clock.now - lost_at > silent_s + 1.5)
    case.leased = True
    await until(lambda: case.clock.now - lost_at > silent_s + 5.0)
    assert case.kinds == ["started", "cut_off"]
    case.leased = False  # on a host that answers
    lost_at -= silent_s
    now = case.clock.now
    await case.handle(1)
    assert 2.0 <= case.clock.now - now <= 3.0
    await case.supervisor.stop(0.0)


async def test_a_node_that_is_cut_off_delays_no_stop(case: Case) -> None:
    async def reachable(address: str) -> bool:
        return False

    case.supervisor.reachable = reachable
    await case.supervisor.start()
    await case.supervisor.stop(10.0)
    assert case.nodes.handles[0].killed.is_set()
    assert case.nodes.handles[0].stops == []


async def test_a_node_that_dies_while_cut_off_is_replaced(case: Case) -> None:
    async def reachable(address: str) -> bool:
        return False

    case.supervisor.reachable = reachable
    await case.supervisor.start()
    case.leased = False
    await until(lambda: "cut_off" in case.kinds)
    case.nodes.handles[0].dead = True
    await case.handle(1)
    assert case.kinds[-2:] == ["died", "started"]
    await case.supervisor.stop(0.0)


async def test_a_short_absence_of_the_lease_is_nothing(case: Case) -> None:
    await case.supervisor.start()
    for _ in range(5):
        case.leased = False
        start = case.clock.now
        while case.clock.now < start + 1.7:
            await asyncio.sleep(0)
        case.leased = True
        start = case.clock.now
        while case.clock.now <= start + 2 * POLL_S:
            await asyncio.sleep(0)
    assert case.kinds == ["started"]
    await case.supervisor.stop(0.0)


async def test_faults_of_a_handle_or_a_listener_do_not_end_the_watch(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(event: NodeEvent) -> None:
        case.events.append(event)
        raise RuntimeError("a listener's fault")

    case.supervisor.on_event = tell
    await case.supervisor.start()
    first = case.nodes.handles[0]
    faults = iter([RuntimeError("Ray hiccup")] * 3)

    def died() -> bool:
        for fault in faults:
            raise fault
        return True

    monkeypatch.setattr(first, "died", died)
    await case.handle(1)
    assert next(faults, None) is None
    await case.supervisor.stop(0.0)


async def test_a_first_start_that_fails_is_raised_and_the_rest_can_be_stopped() -> None:
    nodes = Nodes()
    nodes.failures = {0: NodeUnavailable("no such model")}
    supervisor = Supervisor(nodes.launch)
    supervisor.want("decode", 3)
    with pytest.raises(NodeUnavailable, match="no such model"):
        await supervisor.start()
    await until(lambda: len(nodes.handles) == 3 and all(slot.address for slot in supervisor.slots[1:]))
    await supervisor.stop(0.0)
    assert [handle.stops for handle in nodes.handles] == [[], [0.0], [0.0]]
    assert [handle.killed.is_set() for handle in nodes.handles] == [True, False, False]


async def test_stops_side_by_side_once_and_restarts_nothing() -> None:
    nodes = Nodes()
    supervisor = Supervisor(nodes.launch)
    supervisor.want("decode", 3)
    await supervisor.start()
    beside = threading.Barrier(3)
    for handle in nodes.handles:
        handle.beside = beside
    await supervisor.stop(1.5)
    assert not beside.broken
    await supervisor.stop(1.5)
    for handle in nodes.handles:
        assert handle.stops == [1.5]
        assert not handle.killed.is_set()
        handle.dead = True
    await asyncio.sleep(3 * POLL_S)
    assert len(nodes.handles) == 3


async def test_a_node_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "STOP_MARGIN_S", 2.0)
    nodes = Nodes()
    supervisor = Supervisor(nodes.launch)
    supervisor.want("decode", 2)
    await supervisor.start()
    hung, good = nodes.handles
    hung.stop_s = 60.0
    await supervisor.stop(0.1)
    assert hung.killed.is_set()  # had it been waited for to its end, it would not be
    assert not good.killed.is_set()


async def test_a_node_that_still_starts_is_killed_at_the_end() -> None:
    """It has nothing to drain, and may not hear the question. Mutant: it is drained as the others are."""

    class Starting(Handle):
        def start(self) -> str:
            self.killed.wait(REAL_LIMIT_S)
            raise NodeUnavailable("its process ended")

    nodes: list[Starting] = []

    def launch(role: str, node_id: str, generation: int) -> Handle:
        nodes.append(Starting(node_id, generation))
        return nodes[-1]

    supervisor = Supervisor(launch)
    supervisor.want("decode", 1)
    starting = asyncio.create_task(supervisor.start())
    await until(lambda: supervisor.slots[0].handle is not None)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await supervisor.stop(30.0)
    assert (nodes[0].killed.is_set(), nodes[0].stops) == (True, [])


@pytest.mark.parametrize(("leased", "ticks", "drains"), [(True, False, 1), (False, True, 1), (False, False, 0)])
async def test_a_node_without_lease_that_does_not_answer_delays_no_stop(
    leased: bool, ticks: bool, drains: int, case: Case
) -> None:
    """Mutants: each is waited for; one without lease is not asked; one with a lease is."""
    await case.supervisor.start()
    handle = case.nodes.handles[0]
    case.leased, handle.ticks = leased, ticks
    await case.supervisor.stop(1.0)
    assert (handle.stops, handle.killed.is_set()) == ([1.0] * drains, not drains)


async def test_a_process_that_comes_after_the_stop_is_killed() -> None:
    nodes, begun, go = Nodes(), threading.Event(), threading.Event()

    def slow(role: str, node_id: str, generation: int) -> Handle:
        begun.set()
        go.wait(REAL_LIMIT_S)
        return nodes.launch(role, node_id, generation)

    supervisor = Supervisor(slow)
    supervisor.want("decode", 1)
    starting = asyncio.create_task(supervisor.start())
    await until(begun.is_set)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await supervisor.stop(0.0)
    assert nodes.handles == []  # it comes after everybody has left
    go.set()
    await until(lambda: bool(nodes.handles) and nodes.handles[0].killed.is_set())
    assert [handle.killed.is_set() for handle in nodes.handles] == [True]


async def test_a_node_without_lease_that_answers_is_kept_and_told_once(case: Case) -> None:
    heard: list[tuple[str, int, bool]] = []
    case.supervisor.heard = lambda *told: heard.append(told)
    await case.supervisor.start()
    handle = case.nodes.handles[0]
    handle.ticks, case.leased = True, False
    await until(lambda: case.clock.now > 20.0)
    assert case.kinds == ["started", "kept"]
    assert set(heard) == {("decode-0", 1, True)}
    assert len(heard) <= 30  # one that answers for a whole grace is asked once a second
    handle.ticks, now = False, case.clock.now
    await case.handle(1)
    assert 1.0 <= case.clock.now - now <= 4.0  # a whole grace from its last answer, at most 1 s earlier
    assert heard[-1] == ("decode-0", 1, False)
    assert case.kinds == ["started", "kept", "lease_lost", "started"]
    await case.supervisor.stop(0.0)


@pytest.mark.parametrize(("count", "at_once"), [(1, 1), (2, 1), (3, 2), (4, 2)])
async def test_at_most_half_of_a_role_is_down_for_its_lease(
    count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "LEASE_GRACE_S", 0.1)
    monkeypatch.setattr(supervise, "ASK_AFTER_S", 0.0)
    nodes = Nodes()
    supervisor = Supervisor(nodes.launch)
    supervisor.want("decode", count)
    await supervisor.start()
    nodes.failures = {number: NodeUnavailable("no memory") for number in range(count, 100)}
    supervisor.has_lease = lambda node_id, generation: False
    await until(lambda: sum(handle.killed.is_set() for handle in nodes.handles[:count]) == at_once)
    await asyncio.sleep(0.3)
    assert sum(handle.killed.is_set() for handle in nodes.handles[:count]) == at_once
    nodes.failures.clear()
    await until(lambda: all(handle.killed.is_set() for handle in nodes.handles[:count]))  # one after the other
    await supervisor.stop(0.0)


async def test_who_is_superseded_ends_starts_and_switches_nothing(case: Case) -> None:
    case.supervisor.want("prefill", 1)
    await case.supervisor.start()
    await case.supervisor.stand_down("process 7 on elsewhere")
    for handle in case.nodes.handles:
        handle.dead = True
    case.leased = False
    await asyncio.sleep(3 * POLL_S)
    with pytest.raises(NodeUnavailable, match="another process supervises"):
        await changes_of(case.supervisor).switch("prefill-0", "decode", 1.0)
    await case.supervisor.stop(1.0)
    assert case.kinds == ["started", "started"]
    assert not any(handle.killed.is_set() or handle.stops for handle in case.nodes.handles)


async def test_who_may_have_been_succeeded_does_nothing_until_it_knows(case: Case) -> None:
    """Neither a death, nor a lost lease, nor an operator's wish, nor its own stop is acted on."""
    case.supervisor.want("decode", 1)
    await case.supervisor.start()
    held = False
    case.supervisor.may_act = lambda: held
    first, second = case.nodes.handles
    first.dead, case.leased = True, False
    case.supervisor.slots[1].wish = "leave"
    await asyncio.sleep(3 * POLL_S)
    assert (case.kinds, second.stops, len(case.nodes.handles)) == (["started", "started"], [], 2)
    held = True
    await until(lambda: len(case.nodes.handles) == 3)
    await until(lambda: second.stops == [0.0])
    held = False
    await case.supervisor.stop(1.0)
    assert case.nodes.handles[2].stops == []


@pytest.mark.parametrize("missing", ["prefill-0", "decode-1", "decode"])
async def test_a_node_without_a_place_is_tried_again_while_others_serve(missing: str) -> None:
    nodes, events, room = Nodes(), list[NodeEvent](), False

    def launch(role: str, node_id: str, generation: int) -> Handle:
        if node_id.startswith(missing) and not room:
            raise NotPlaced(f"{node_id}: no host")
        return nodes.launch(role, node_id, generation)

    supervisor = Supervisor(launch, events.append)
    supervisor.want("prefill", 1)
    supervisor.want("decode", 2)
    if missing == "decode":  # nobody can serve
        with pytest.raises(NotPlaced, match="decode-0: no host"):
            await supervisor.start()
    else:
        await supervisor.start()
        assert {(event.kind, event.node_id) for event in events if event.node_id == missing} == {
            ("start_failed", missing)
        }
        assert len(nodes.handles) == 2
        room = True
        await until(lambda: len(nodes.handles) == 3)
    await supervisor.stop(0.0)


async def test_nodes_that_start_keep_no_thread_from_requests() -> None:
    """A long prompt is made tokens of in a thread of the event loop's. Mutant: nodes are started there."""
    go_on = threading.Event()

    class Slow(Handle):
        def start(self) -> str:
            go_on.wait(5.0)
            return super().start()

    supervisor = Supervisor(lambda role, node_id, generation: Slow(node_id, generation))
    supervisor.want("decode", 40)
    starting = asyncio.create_task(supervisor.start())
    try:
        await until(lambda: sum(slot.handle is not None for slot in supervisor.slots) == 40)
        async with asyncio.timeout(2.0):
            assert await asyncio.to_thread(int) == 0
    finally:
        go_on.set()
    await starting
    await supervisor.stop(0.0)
