"""A request is given up when it is shown that it kills nodes, and not because nodes fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from cluster.routing import pairing, quarantine
from cluster.routing.quarantine import (
    DEATHS,
    EXPLAIN_S,
    FEW_TOKENS,
    FORGET_S,
    REST_LIFE_S,
    REST_S,
    TURN_S,
    Quarantine,
    Suspicion,
)
from cluster.state import evidence
from cluster.state.connection import connect
from cluster.state.evidence import Evidence
from cluster.state.registry_types import NodeRecord
from cluster.state.sealing import Seal
from paceline.errors import InvalidRequest, PacelineError
from paceline.results import Generation
from tests.fakes.redis_servers import Embedded
from tests.support.router_asks import TEXT, answer, ask
from tests.support.scripted_nodes import Fleet, Script, fleet


def held() -> Script:
    """A node that begins a stream and says nothing more."""
    return Script(gate=asyncio.Event())


async def die_under(made: Fleet, times: int, streams: int = 1, away_s: float = 0.0) -> None:
    """The only decode node dies so often with these streams in progress, and its next generation comes."""
    for generation in range(1, times + 1):
        while made.nodes["decode-0"].active < streams:
            await asyncio.sleep(0.005)
        await made.kill("decode-0")
        await asyncio.sleep(away_s)
        await made.start("decode-0", generation + 1, held())


async def ended(asked: asyncio.Task[Generation]) -> Generation | PacelineError:
    async with asyncio.timeout(10):
        try:
            return await asked
        except PacelineError as error:
            return error


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three deaths are enough, once nodes have lived after them."""
    monkeypatch.setattr(pairing, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(quarantine, "ACCIDENT", 0.05)


@pytest.fixture
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEAST_S", 0.001), ("REST_LIFE_S", 0.6), ("TURN_S", 0.01)):
        monkeypatch.setattr(quarantine, name, seconds)


@pytest.mark.usefixtures("sooner")
@pytest.mark.parametrize("away_s", [0.0, 0.1])
async def test_a_request_under_which_nodes_die_is_refused_also_under_another_id(
    away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a node that it waited for is taken before it is known what the last one died of."""
    monkeypatch.setattr(quarantine, "EXPLAIN_S", 0.05)
    async with fleet() as made:
        made.nodes["decode-0"].script = held()
        asked = asyncio.create_task(answer(made, ask()))
        await die_under(made, DEATHS, away_s=away_s)
        error = await ended(asked)
        assert isinstance(error, InvalidRequest)
        assert (error.code, error.field) == ("quarantined", "request")
        named = ", ".join(f"decode-0 generation {number}" for number in range(1, DEATHS + 1))
        assert f"it was the one request in progress when {named} died" in str(error)
        made.nodes["decode-0"].script.gate = None
        with pytest.raises(InvalidRequest, match="is quarantined"):
            await answer(made, ask(seed=6))
        assert (await answer(made, ask(prompt="jello"))).text == TEXT[:10]


@pytest.mark.usefixtures("sooner")
async def test_requests_that_nodes_died_under_together_go_on() -> None:
    """Neither is shown to be the one. Mutant: deaths are counted alone."""
    async with fleet() as made:
        made.nodes["decode-0"].script = held()
        asked = [asyncio.create_task(answer(made, ask(prompt=prompt))) for prompt in ("hello", "jello")]
        await die_under(made, DEATHS + 1, streams=2)
        gate = made.nodes["decode-0"].script.gate
        assert gate is not None
        gate.set()
        assert [getattr(await ended(each), "text", "") for each in asked] == [TEXT[:10]] * 2


class Case:
    """A request, and a decode node under it."""

    def __init__(self, nodes: int = 1) -> None:
        self.now = 0.0
        self.records = [NodeRecord(f"decode-{number}", "decode", 1, f"host:{number}") for number in range(nodes)]
        self.quarantine = Quarantine(lambda: self.records, lambda: self.now)
        self.suspicion = self.ask()

    def ask(self, request_id: str = "r", prompt: int = 1) -> Suspicion:
        return self.quarantine.suspicion(request_id, [prompt], "")

    def lose(
        self, state: str = "ready", num_tokens: int = 0, *, replaced: bool = True, seconds: float = 0.0, at: int = 0
    ) -> None:
        """A node, after so many seconds of an attempt."""
        old = self.records[at]
        self.records[at] = NodeRecord(old.id, "decode", old.generation, old.address, state)
        with self.quarantine.running(old, self.suspicion):
            self.now += seconds
        self.quarantine.lost(old, self.suspicion, num_tokens)
        self.records[at] = NodeRecord(old.id, "decode", old.generation + replaced, old.address)

    def live(self, seconds: float = REST_LIFE_S) -> None:
        """The nodes live so long."""
        self.refused  # noqa: B018  # it looks
        self.now += seconds

    @property
    def suspected(self) -> bool:
        return self.quarantine.waits(self.suspicion)

    @property
    def refused(self) -> bool:
        return self.refuses(self.suspicion)

    def refuses(self, suspicion: Suspicion) -> bool:
        try:
            if not self.quarantine.waits(suspicion):
                self.quarantine.check(suspicion)
        except InvalidRequest:
            return True
        return False


@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        ({}, True),
        ({"state": "draining"}, False),  # an operator stops it
        ({"replaced": False}, False),  # it is behind a cut cable, and comes back as it was
        ({"num_tokens": FEW_TOKENS}, False),  # it did well for a while
    ],
)
def test_what_counts_as_a_death(loss: dict[str, object], refused: bool) -> None:
    case = Case()
    for _ in range(DEATHS):
        assert not case.refused
        case.lose(**loss)  # type: ignore[arg-type]
    case.live()
    assert case.refused == refused


async def test_what_killed_behind_one_router_is_not_tried_anew_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: deaths behind other routers are not counted; those of a request of another id are; a note that another
    deployment sealed is believed; a refusal is told to nobody."""
    monkeypatch.setattr(evidence, "EVERY_S", 0.01)
    cases, key = [Case() for _ in range(3)], "11" * 32
    with Embedded() as redis:
        shared = [Evidence(redis.url, Seal(key), case.quarantine.hear) for case in cases]
        stranger = Evidence(redis.url, Seal("22" * 32), lambda note: None)
        for case, one in zip(cases, shared, strict=True):
            case.quarantine.tell = one.tell
        for one in (*shared, stranger):
            one.start()
        first, second, third = cases
        for _ in range(DEATHS):
            first.lose()
        stranger.tell(b'{"prompt": "%s", "said": "refused"}' % third.suspicion.prompt.encode())
        await until(lambda: [len(one) for one in second.quarantine._deaths.values()] == [DEATHS])
        second.records, third.records = list(first.records), list(first.records)
        assert not second.refuses(second.ask("another"))
        assert not third.refuses(third.ask("another"))
        second.live()
        assert second.refused
        await until(lambda: third.refuses(third.ask("another")))
        assert not third.refuses(third.ask(prompt=2))
        for one in (*shared, stranger):
            await one.close()


async def test_who_dies_beside_a_killer_behind_another_router_is_not_refused() -> None:
    """Mutant: a death counts with the requests of the router alone that saw it."""
    victims, killers = Case(), Case()
    killers.suspicion = killers.ask("killer", prompt=2)
    victims.quarantine.tell, killers.quarantine.tell = killers.quarantine.hear, victims.quarantine.hear

    def die(generation: int, under: list[Case]) -> None:
        node = NodeRecord("decode-0", "decode", generation, "host:1")
        for case in (victims, killers):
            case.records = [NodeRecord("decode-0", "decode", generation + 1, "host:1")]
        for case in under:
            with case.quarantine.running(node, case.suspicion):
                case.quarantine.lost(node, case.suspicion, 0)

    for generation in range(1, DEATHS + 1):
        die(generation, [victims, killers])
    for case in (victims, killers):
        case.live()
        assert not case.refused
    die(DEATHS + 1, [killers])
    for case in (victims, killers):
        case.live()
        assert case.refused == (case is killers)


async def test_a_note_that_has_ended_is_not_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to Redis could have a prompt refused for good. Mutant: the end is the score's alone."""
    monkeypatch.setattr(evidence, "EVERY_S", 0.01)
    monkeypatch.setattr(evidence, "LIFE_S", 3.0)
    heard: list[bytes] = []
    with Embedded() as redis, connect(redis.url) as thief:
        first, second = (Evidence(redis.url, Seal("11" * 32), hear) for hear in (heard.append, heard.append))
        first.tell(b"a note")
        first.start()
        await until(lambda: heard == [b"a note"])
        key = "paceline:default:evidence"
        (sealed,) = thief.zrange(key, 0, -1)
        await asyncio.sleep(3.05)
        thief.zadd(key, {sealed: 2e12})
        second.start()
        await until(lambda: second._seen == {sealed} and first._seen == {sealed})
        assert heard == [b"a note"]
        await first.close()
        await second.close()


async def test_what_others_told_is_heard_while_redis_takes_no_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a router with a note of its own reads nothing then; the note is lost."""
    monkeypatch.setattr(evidence, "EVERY_S", 0.01)
    heard: list[list[bytes]] = [[], []]
    with Embedded() as redis, connect(redis.url) as operator:
        first, second = (Evidence(redis.url, Seal("11" * 32), here.append) for here in heard)
        first.tell(b"before")
        first.start()
        await until(lambda: heard[0] == [b"before"])
        operator.config_set("maxmemory-policy", "noeviction")
        operator.config_set("maxmemory", "1kb")
        second.tell(b"meanwhile")
        second.start()
        await until(lambda: heard[1] == [b"before"])
        operator.config_set("maxmemory", "0")
        await until(lambda: len(heard[0]) == len(heard[1]) == 2)
        assert heard[0] == heard[1] == [b"before", b"meanwhile"]
        await first.close()
        await second.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_one_death_counts_once_however_often_the_node_was_lost_before() -> None:
    """A cable that is cut again and again kills no node. Mutant: each loss of a process counts."""
    case = Case()
    for replaced in (False, False, True):
        case.lose(replaced=replaced)
    case.live()
    assert not case.refused


def test_an_attempt_that_does_well_ends_the_suspicion() -> None:
    """Mutant: deaths of before count on."""
    case = Case()
    for deaths in (DEATHS - 1, DEATHS):
        for _ in range(deaths):
            case.live()
            assert not case.refused
            case.lose()
        if deaths < DEATHS:
            case.lose(num_tokens=FEW_TOKENS, replaced=False)
    case.live()
    assert case.refused


def test_suspects_wait_for_each_other_and_for_nodes_that_live() -> None:
    """Each wait has an end. Mutants: the next one waits for ever, or after a node died under the first; requests that
    are none wait."""
    case = Case(nodes=2)
    first, second = both = case.suspicion, case.ask(prompt=2)
    for _ in range(DEATHS):
        for suspicion in both:
            for node in case.records:
                with case.quarantine.running(node, suspicion):
                    pass
        old = case.records[0]
        case.records[0] = NodeRecord(old.id, "decode", old.generation + 1, old.address)
        with case.quarantine.running(old, first), case.quarantine.running(old, second):
            case.quarantine.lost(old, first, 0)
            case.quarantine.lost(old, second, 0)
    assert not any(case.quarantine.waits(suspicion) for suspicion in both)
    assert not case.refuses(first)
    assert [case.quarantine.waits(suspicion) for suspicion in both] == [False, True]
    case.now += TURN_S  # its node lives
    assert not case.refuses(second)
    assert case.quarantine.waits(first)
    case.suspicion = second
    case.lose(seconds=1.0)
    assert not case.quarantine.waits(first)
    case.records = []
    assert case.quarantine.waits(second)
    case.now += max(REST_S, EXPLAIN_S)
    assert not case.quarantine.waits(second)
    assert not case.quarantine.waits(case.ask(prompt=3))


@pytest.mark.parametrize(("prompt", "salt"), [(1, "another's"), (2, "")])
def test_a_request_of_the_same_id_is_another(prompt: int, salt: str) -> None:
    """Clients choose ids, and a gateway may give one to all calls of a trace. Mutants: requests are told apart by their
    id alone, or by that and the tenant."""
    case = Case()
    innocent = case.quarantine.suspicion("r", [prompt], salt)
    for generation in range(1, DEATHS + 1):
        node = NodeRecord("decode-0", "decode", generation, "host:1")
        with case.quarantine.running(node, case.suspicion), case.quarantine.running(node, innocent):
            case.quarantine.lost(node, innocent, 0)
        case.records = [NodeRecord("decode-0", "decode", generation + 1, "host:1")]
    case.live()
    assert not case.refuses(innocent)


def test_the_next_node_waits_until_it_is_known_what_became_of_the_last_one() -> None:
    """Else a request kills one node more than it must. Mutant: only deaths that are known are looked at."""
    case = Case()
    for _ in range(DEATHS - 1):
        case.lose()
    assert not case.suspected
    old = case.records[0]
    case.quarantine.lost(old, case.suspicion, 0)
    for records, waits in (([], True), ([old], False), ([], True)):
        case.records = list(records)
        assert case.suspected == waits
    case.now += EXPLAIN_S
    assert not case.suspected


def test_a_prompt_is_refused_for_a_while_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_PROMPTS", 2)
    case = Case()
    for prompt in range(3):
        case.suspicion = case.ask(prompt=prompt)
        for _ in range(DEATHS):
            assert not case.refused
            case.lose()
        case.live()
        assert case.refused
    for prompt, refused in ((0, False), (1, True), (2, True)):
        case.suspicion = case.ask("another", prompt)
        assert case.refused == refused
    case.now += FORGET_S + 1
    assert not case.refused
