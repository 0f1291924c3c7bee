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
    MORE_DEATHS,
    QUIET_S,
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
    monkeypatch.setattr(pairing, "FIRST_BACKOFF_S", 0.005)
    monkeypatch.setattr(quarantine, "QUIET_S", 0.1)


@pytest.mark.parametrize("away_s", [0.0, 0.1])
async def test_a_request_under_which_nodes_die_is_refused_also_under_another_id(
    away_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a node that it waited for is taken before it is known what the last one died of."""
    monkeypatch.setattr(quarantine, "EXPLAIN_S", 0.05)
    async with fleet() as made:
        made.nodes["decode-0"].script = held()
        asked = asyncio.create_task(answer(made, ask()))
        await die_under(made, DEATHS + 1, away_s=away_s)
        error = await ended(asked)
        assert isinstance(error, InvalidRequest)
        assert (error.code, error.field) == ("quarantined", "request")
        named = ", ".join(f"decode-0 generation {number}" for number in range(1, DEATHS + 2))
        assert f"it was the one request in progress when {named} died" in str(error)
        made.nodes["decode-0"].script.gate = None
        with pytest.raises(InvalidRequest, match="is quarantined"):
            await answer(made, ask(seed=6))
        assert (await answer(made, ask(prompt="jello"))).text == TEXT[:10]


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

    def __init__(self) -> None:
        self.now, self.records = 0.0, [NodeRecord("decode-0", "decode", 1, "host:1")]
        self.quarantine = Quarantine(lambda: self.records, lambda: self.now)
        self.suspicion = self.ask()

    def ask(self, request_id: str = "r", prompt: int = 1) -> Suspicion:
        return self.quarantine.suspicion(request_id, [prompt], "")

    def lose(self, state: str = "ready", num_tokens: int = 0, *, replaced: bool = True) -> None:
        old = self.records[0]
        self.records = [NodeRecord("decode-0", "decode", old.generation, "host:1", state)]
        with self.quarantine.running(old, self.suspicion):
            self.quarantine.lost(old, self.suspicion, num_tokens)
        self.records = [NodeRecord("decode-0", "decode", old.generation + replaced, "host:1")]

    def wait(self) -> None:
        """Until the trial of a suspect."""
        looks = 10
        for _ in range(looks + 2):
            self.now += quarantine.QUIET_S / looks
            self.suspected  # noqa: B018  # it looks

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
        assert not case.suspected
        case.lose(**loss)  # type: ignore[arg-type]
    assert case.suspected == refused
    case.wait()
    assert not case.refused
    case.lose(**loss)  # type: ignore[arg-type]
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
        assert not second.quarantine.waits(second.ask("another"))
        assert not third.refuses(third.ask("another"))
        assert second.suspected
        second.wait()
        assert not second.refused
        second.lose()
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
    assert not victims.suspected
    assert not killers.suspected
    die(DEATHS + 1, [killers])
    assert killers.suspected
    killers.wait()
    assert not killers.refused
    die(DEATHS + 2, [killers])
    assert killers.refused
    assert not victims.suspected


async def test_a_note_that_has_ended_is_not_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes to Redis could have a prompt refused for good. Mutant: the end is the score's alone."""
    monkeypatch.setattr(evidence, "EVERY_S", 0.01)
    monkeypatch.setattr(evidence, "LIFE_S", 1.0)
    heard: list[bytes] = []
    with Embedded() as redis, connect(redis.url) as thief:
        first, second = (Evidence(redis.url, Seal("11" * 32), hear) for hear in (heard.append, heard.append))
        first.tell(b"a note")
        first.start()
        await until(lambda: heard == [b"a note"])
        key = "paceline:default:evidence"
        (sealed,) = thief.zrange(key, 0, -1)
        await asyncio.sleep(1.05)
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
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


def test_one_death_counts_once_however_often_the_node_was_lost_before() -> None:
    """A cable that is cut again and again kills no node. Mutant: each loss of a process counts."""
    case = Case()
    for replaced in (False, False, True):
        case.lose(replaced=replaced)
    assert not case.suspected


@pytest.mark.parametrize("without", [0, 1, 5])
def test_nodes_that_die_without_a_suspect_speak_for_a_request(without: int) -> None:
    """Something else ends nodes, also nodes that nobody knows at the moment. Mutants: such deaths count for nothing;
    only nodes with a lease are counted."""
    case, others = Case(), [NodeRecord(f"decode-{i}", "decode", 1, f"host:{i}") for i in (1, 2)]
    case.records += others
    case.quarantine._generations()
    case.records = case.records[:1]
    for deaths in range(1, DEATHS + MORE_DEATHS * without + 1):
        assert not case.suspected
        case.lose()
        if deaths == 1:
            case.records += [NodeRecord("decode-1", "decode", 1 + without, "host:1"), others[1]]
            case.quarantine._generations()
    assert case.suspected


def test_a_trial_that_goes_well_ends_the_suspicion() -> None:
    """Mutants: the next death counts as one of the trial; those of before count on."""
    case = Case()
    for _ in range(DEATHS):
        case.lose()
    case.wait()
    assert not case.refused
    assert case.suspicion.on_trial
    case.lose(num_tokens=FEW_TOKENS, replaced=False)
    for _ in range(DEATHS):
        assert not case.suspected
        case.lose()
    assert case.suspected


def test_two_that_kill_do_not_speak_for_each_other() -> None:
    """They are tried one after the other. Mutants: deaths under another suspect count as deaths without one; both are
    tried at once."""
    case = Case()
    case.records.append(NodeRecord("decode-1", "decode", 1, "host:2"))
    both = [case.suspicion, case.ask(prompt=2)]
    for _ in range(DEATHS):
        for which, suspicion in enumerate(both):
            node = case.records[which]
            with case.quarantine.running(node, suspicion):
                case.quarantine.lost(node, suspicion, 0)
            case.records[which] = NodeRecord(node.id, "decode", node.generation + 1, node.address)
    assert all(case.quarantine.waits(suspicion) for suspicion in both)
    case.wait()
    assert not any(case.refuses(suspicion) for suspicion in both)
    assert [suspicion.on_trial for suspicion in both] == [True, False]


@pytest.mark.parametrize("disturbed", ["a node dies", "no node is there", "nobody looks"])
def test_no_suspect_is_tried_before_nodes_have_lived_without_it(
    disturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: each of the three counts as quiet."""
    monkeypatch.setattr(quarantine, "QUIET_S", QUIET_S)
    case = Case()
    idle = NodeRecord("decode-1", "decode", 1, "host:2")
    for _ in range(DEATHS):
        case.lose()
    case.records.append(idle)
    case.now += QUIET_S
    assert case.suspected  # the first look
    for second in range(1, int(QUIET_S)):
        case.now += 1.0
        if disturbed == "a node dies" and second == 20:
            case.records.remove(idle)
        if disturbed == "no node is there":
            case.records = []
        if disturbed != "nobody looks" or second < 20:
            assert case.suspected
    case.now += 2.0
    assert case.suspected
    case.records = [idle]
    case.wait()
    assert not case.suspected


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
    assert not case.quarantine.waits(innocent)


def test_the_next_node_waits_until_it_is_known_what_became_of_the_last_one() -> None:
    """Else a request kills one node more than it must. Mutant: only deaths that are known are looked at."""
    case = Case()
    for _ in range(DEATHS - 1):
        case.lose()
    assert not case.suspected
    old = case.records[0]
    case.quarantine.lost(old, case.suspicion, 0)
    for records, waits in (([], True), ([old], False), ([NodeRecord("decode-0", "decode", 9, "host:1")], False)):
        case.records = list(records)
        assert case.suspected == waits
    case.records, case.now = [], EXPLAIN_S
    assert not case.suspected


def test_a_prompt_is_refused_for_a_while_and_few_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_PROMPTS", 2)
    case = Case()
    for prompt in range(3):
        case.suspicion = case.ask(prompt=prompt)
        for _ in range(DEATHS):
            case.lose()
        case.wait()
        assert not case.refused
        case.lose()
        assert case.refused
    for prompt, refused in ((0, False), (1, True), (2, True)):
        case.suspicion = case.ask("another", prompt)
        assert case.refused == refused
    case.now = FORGET_S + 1
    assert not case.refused
