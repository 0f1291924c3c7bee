"""Which nodes a router leaves out, and for how long."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.routing.attempt import Pair
from cluster.routing.breaker import FAILURES_TO_OPEN, OPEN_S, SUCCESSES_TO_CLOSE, Breakers
from cluster.routing.node_calls import NodeCalls, NodeFailure
from cluster.routing.pairing import Pairing, Tries
from cluster.state.registry_types import NodeRecord
from paceline.errors import NodeUnavailable
from paceline.rpc.calls import start_server


class Calls(NodeCalls):
    """Connections as a test wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.without: set[str] = set()  # ids of nodes that there is no connection to

    def connected(self, node: NodeRecord) -> bool:
        return node.id not in self.without


class Case:
    """Two decode nodes."""

    def __init__(self) -> None:
        self.nodes = [NodeRecord(f"decode-{i}", "decode", 1, f"host:{i}", total_pages=9, free_pages=9) for i in (0, 1)]
        self.calls: Any = Calls()
        self.pairing = Pairing(lambda: self.nodes, self.calls, page_size=16)

    def lose(self, number: int) -> None:
        node = self.nodes[number]
        self.calls.without.add(node.id)
        self.pairing.suspect(NodeFailure(node, NodeUnavailable("gone"), gone=True))

    @property
    def alive(self) -> list[str]:
        return [node.id for node in self.pairing.alive("decode")]


@pytest.fixture
def case() -> Case:
    return Case()


def test_a_node_is_left_out_for_as_long_as_there_is_no_connection(case: Case) -> None:
    """However long it keeps its lease: a cut cable between it and this router alone is no reason to lose that."""
    case.lose(0)
    for _ in range(3):
        assert case.alive == ["decode-1"]
    case.calls.without.clear()
    assert case.alive == ["decode-0", "decode-1"]
    case.calls.without.add("decode-0")  # a connection that idles is none, and no failure
    assert case.alive == ["decode-0", "decode-1"]


def test_a_failure_of_a_node_that_answers_is_no_reason(case: Case) -> None:
    case.calls.without.add("decode-0")
    case.pairing.suspect(NodeFailure(case.nodes[0], NodeUnavailable("draining")))
    assert case.alive == ["decode-0", "decode-1"]


def test_its_next_generation_is_not_suspected(case: Case) -> None:
    case.lose(0)
    case.nodes[0] = NodeRecord("decode-0", "decode", 2, "host:7", total_pages=9, free_pages=9)
    assert case.alive == ["decode-0", "decode-1"]


@pytest.mark.parametrize("tries", [Tries(failures=1), Tries(prefill_failures=1)])
async def test_the_only_node_is_waited_for_and_taken_once_it_is_back(case: Case, tries: Tries) -> None:
    del case.nodes[1]
    case.lose(0)
    asked = 0

    def connected(node: NodeRecord) -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    case.calls.connected = connected
    pair = await case.pairing.pick(tries, 10)
    assert pair.decode is case.nodes[0]
    assert asked > 3


@pytest.mark.parametrize(("tries", "ends"), [(Tries(), True), (Tries(goes_on=True), False)])
async def test_requests_wait_where_all_nodes_start(case: Case, tries: Tries, ends: bool) -> None:
    """New ones for a bounded time, streams until their deadline. Mutants: new ones are refused at once; they wait for
    ever."""
    starting = case.nodes.pop()
    case.nodes.clear()
    case.pairing = Pairing(lambda: case.nodes, case.calls, page_size=16, wait_s=0.2)
    waiting = [asyncio.create_task(case.pairing.pick(tries, 10)) for _ in range(2)]
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    if not ends:
        await asyncio.sleep(0.2)
    case.nodes.append(starting)
    assert (await waiting[0]).decode is (await waiting[1]).decode is starting
    case.nodes.clear()
    if ends:
        with pytest.raises(NodeUnavailable, match="nor came to life"):
            await asyncio.wait_for(case.pairing.pick(tries, 10), 5)


def test_a_token_makes_failures_of_both_roles_forgotten() -> None:
    tries = Tries(failures=2, prefill_failures=3)
    tries.progressed()
    assert (tries.failures, tries.prefill_failures) == (0, 0)


async def test_a_suspected_node_is_connected_to_again_though_nobody_asks_for_a_node() -> None:
    """Else the first requests after a partition would all go to the nodes that were not behind it."""
    reserved = socket.socket()  # it refuses, and lets nobody else have the port
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{reserved.getsockname()[1]}"
    node, calls = NodeRecord("decode-0", "decode", 1, address), NodeCalls()
    pairing = Pairing(lambda: [node], calls, page_size=16)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    try:
        pairing.suspect(NodeFailure(node, NodeUnavailable("gone"), gone=True))
        await asyncio.sleep(0.3)
        server.add_insecure_port(address)
        await server.start()
        async with asyncio.timeout(20):  # asked for its state alone, a channel tries nothing
            while calls._line(node).channel.get_state() is not grpc.ChannelConnectivity.READY:
                await asyncio.sleep(0.01)
        assert pairing.alive("decode") == [node]
    finally:
        await server.stop(0)
        await calls.close()
        reserved.close()


def test_attempts_that_succeed_close_a_breaker_that_is_half_open(case: Case) -> None:
    now = 0.0
    case.pairing.breakers = breakers = Breakers(lambda: now)
    node = case.nodes[0]
    attempt: Any = SimpleNamespace(pair=Pair(node, None))
    for _ in range(FAILURES_TO_OPEN):
        with pytest.raises(NodeFailure), case.pairing.judged(attempt, Tries().suspicion):
            raise NodeFailure(node, NodeUnavailable("broken"))
    assert breakers.state(node) == "open"
    now = OPEN_S
    for _ in range(SUCCESSES_TO_CLOSE):
        assert breakers.state(node) == "half_open"
        with case.pairing.judged(attempt, Tries().suspicion):
            pass
    assert breakers.state(node) == "closed"


def test_pauses_between_attempts_double() -> None:
    error = NodeUnavailable("gone")
    pauses = [Tries(failures=number).backoff_s(error) for number in range(4)]
    assert pauses[0] == 0.0
    assert pauses[1] > 0
    assert pauses[2:] == [2 * pauses[1], 4 * pauses[1]]


async def test_a_connection_is_tried_for_and_its_loss_is_seen() -> None:
    server, address = await start_server(lambda server: None, "127.0.0.1", 4)
    node, calls = NodeRecord("decode-0", "decode", 1, address), NodeCalls()

    async def until(state: bool) -> None:
        async with asyncio.timeout(5.0):
            while calls.connected(node) is not state:
                await asyncio.sleep(0.01)

    try:
        assert not calls.connected(node)
        await until(True)
        await server.stop(0)
        await until(False)
    finally:
        await server.stop(0)
        await calls.close()
