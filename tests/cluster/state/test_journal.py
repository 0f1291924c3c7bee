"""The journal on a real server: bounded, expiring, back after an outage, and never waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from cluster.state import journal as module
from cluster.state.connection import may_pass
from cluster.state.journal import ENTRY_OVERHEAD_BYTES, Journal, journal_key, open_journal
from cluster.state.sealing import MAGIC, OVERHEAD_BYTES, Seal
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable
from tests.fakes.redis_servers import SERVERS, Embedded, Server, stopped

KEY = "11" * 32
SEAL = Seal(KEY)
PREFIX = "paceline:default:journal:sealed:"
KEYS = [journal_key("tenant", f"{i:032x}") for i in range(40)]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = SERVERS[request.param]()
    yield made
    made.close()


@pytest.fixture
def embedded() -> Iterator[Embedded]:
    with Embedded() as made:
        yield made


class Observed:
    """A running journal and its counters."""

    def __init__(self, url: str, **options: Any) -> None:
        self.registry = CollectorRegistry()
        bounds: dict[str, Any] = {"ttl_s": 60.0, "entry_bytes": 10_000, "total_bytes": 1_000_000} | options
        self.journal = Journal(url, SEAL, registry=self.registry, **bounds)

    @contextmanager
    def without_client(self) -> Iterator[None]:
        """Whatever would ask Redis in here, or wait for it, fails."""
        client, self.journal._client = self.journal._client, None
        try:
            yield
        finally:
            self.journal._client = client

    @property
    def written(self) -> float:
        return self.registry.get_sample_value("paceline_journal_writes_total") or 0.0

    def refused(self, reason: str) -> float:
        return self.registry.get_sample_value("paceline_journal_refused_total", {"reason": reason}) or 0.0

    def dropped(self, reason: str) -> float:
        return self.registry.get_sample_value("paceline_journal_dropped_total", {"reason": reason}) or 0.0


@asynccontextmanager
async def running(url: str, **options: Any) -> AsyncIterator[Observed]:
    made = Observed(url, **options)
    made.journal.start()
    try:
        yield made
    finally:
        await made.journal.close()


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def stored(server: Server) -> dict[str, bytes]:
    """What Redis has, by key, opened."""
    with redis.Redis.from_url(server.url) as client:
        found = {key.decode(): client.get(key) for key in client.keys(f"{PREFIX}*")}
        return {key.removeprefix(PREFIX): SEAL.open(key, value) for key, value in found.items() if value is not None}


def ttl_s(server: Server, key: str) -> float:
    with redis.Redis.from_url(server.url) as client:
        return float(client.pttl(PREFIX + key)) / 1000


async def test_an_entry_is_there_at_once_and_goes_soon_after_its_answer(server: Server) -> None:
    async with running(server.url) as made:
        kept = made.journal.keep(KEYS[0], b"request")
        assert kept is not None
        await until(lambda: stored(server) == {KEYS[0]: b"request"})
        assert 50 < ttl_s(server, KEYS[0]) <= 60
        assert await made.journal.read(KEYS[0]) == b"request"
        assert await made.journal.read(KEYS[1]) is None
        made.journal.release(kept, complete=True)
        await until(lambda: ttl_s(server, KEYS[0]) <= module.COMPLETE_TTL_S)
        assert stored(server) == {KEYS[0]: b"request"}


async def test_an_entry_is_written_once_until_it_needs_it_again(embedded: Embedded) -> None:
    async with running(embedded.url) as made:
        kept = made.journal.keep(KEYS[0], b"request")
        assert kept is not None
        await until(lambda: kept.written_at > 0)
        await asyncio.sleep(0.2)  # nothing is due meanwhile
        assert made.registry.get_sample_value("paceline_journal_writes_total") == 1
    journal = made.journal
    for early_s, due in ((1.0, []), (0.0, [KEYS[0]])):
        kept.written_at = time.monotonic() - 60.0 / module.REFRESHES_PER_TTL + early_s
        journal._sweep_at = 0.0
        journal._sweep()
        assert list(journal._due) == due


async def test_what_redis_still_has_counts_until_it_expires(embedded: Embedded) -> None:
    """Else total_bytes would bound what runs, and not what lies in Redis."""
    async with running(embedded.url) as made:
        journal, kept = made.journal, made.journal.keep(KEYS[0], b"request")
        assert kept is not None
        journal.release(kept, complete=False)
        await until(lambda: not journal._due and kept.expires_at > 0)
    for expires_in_s, held in ((30.0, [KEYS[0]]), (-1.0, [])):
        kept.expires_at = time.monotonic() + expires_in_s
        journal._sweep_at = 0.0
        journal._sweep()
        assert (list(journal._held), journal._bytes > 0) == (held, bool(held))


async def test_what_broke_stays_for_its_whole_life(embedded: Embedded) -> None:
    async with running(embedded.url) as made:
        kept = made.journal.keep(KEYS[0], b"request")
        assert kept is not None
        made.journal.release(kept, complete=False)
        await until(lambda: bool(stored(embedded)))
        assert ttl_s(embedded, KEYS[0]) > 50


async def test_a_running_stream_outlives_the_lifetime_and_an_ended_one_does_not(embedded: Embedded) -> None:
    async with running(embedded.url, ttl_s=0.4) as made:
        kept = made.journal.keep(KEYS[0], b"request")
        await asyncio.sleep(1.2)
        await until(lambda: stored(embedded) == {KEYS[0]: b"request"})  # it may be late, but is written again and again
        assert kept is not None
        made.journal.release(kept, complete=False)
        await until(lambda: not stored(embedded))
        await until(lambda: not made.journal._held)  # nor does it take memory any more
        assert made.journal._bytes == 0


async def test_the_oldest_give_way(embedded: Embedded) -> None:
    room = 4 * (100 + ENTRY_OVERHEAD_BYTES)
    async with running(embedded.url, total_bytes=room) as made:
        for key in KEYS[:4]:
            made.journal.keep(key, bytes(100))
        await until(lambda: len(stored(embedded)) == 4)
        for key in KEYS[4:10]:
            made.journal.keep(key, bytes(100))
        await until(lambda: set(stored(embedded)) == set(KEYS[6:10]))
        assert made.dropped("full") == 6
        assert made.journal._bytes == room


async def test_a_large_request_is_not_kept(embedded: Embedded) -> None:
    async with running(embedded.url, entry_bytes=100) as made:
        assert made.journal.keep(KEYS[0], bytes(101)) is None
        assert made.journal.keep(KEYS[1], bytes(100)) is not None
        await until(lambda: set(stored(embedded)) == {KEYS[1]})
        assert made.dropped("size") == 1


async def test_a_second_stream_of_a_generation_takes_over(embedded: Embedded) -> None:
    async with running(embedded.url) as made:
        first = made.journal.keep(KEYS[0], b"request")
        second = made.journal.keep(KEYS[0], b"request")
        assert first is not None
        assert second is not None
        made.journal.release(first, complete=True)  # the end of the stream that broke comes late
        await until(lambda: bool(stored(embedded)))
        assert second.live
        assert ttl_s(embedded, KEYS[0]) > 50
        assert made.journal._bytes == second.size


async def test_an_outage_delays_nothing_overflows_counted_and_ends(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(server.url, total_bytes=10 * (100 + ENTRY_OVERHEAD_BYTES)) as made:
        made.journal.keep(KEYS[0], bytes(100))
        await until(lambda: len(stored(server)) == 1)
        server.kill()
        with made.without_client():
            kept = [made.journal.keep(key, bytes(100)) for key in KEYS[1:30]]
        assert made.dropped("full") == 20
        assert len(made.journal._held) == 10
        with pytest.raises(NodeUnavailable, match="journal"):
            await made.journal.read(KEYS[0])
        await until(lambda: "cannot be written" in caplog.text)
        server.start_again()
        await until(lambda: set(stored(server)) == set(KEYS[20:30]))
        assert all(one is not None for one in kept)
        await until(lambda: "is written again" in caplog.text)


async def test_a_redis_that_lost_its_data_has_what_runs_again(server: Server) -> None:
    async with running(server.url, ttl_s=2.0) as made:
        made.journal.keep(KEYS[0], b"runs")
        ended = made.journal.keep(KEYS[1], b"ended")
        assert ended is not None
        made.journal.release(ended, complete=True)
        await until(lambda: len(stored(server)) == 2)
        server.kill()
        server.start_again()
        await until(lambda: stored(server) == {KEYS[0]: b"runs"})


async def test_data_lost_between_two_batches_is_written_again(embedded: Embedded) -> None:
    """Nobody saw Redis away: the client connects anew by itself. Mutants: nothing is read of what Redis had; what a
    batch wrote is written again; a Redis that evicts the key is written to over and over; the key is soon gone."""
    async with running(embedded.url) as made:
        made.journal.keep(KEYS[0], b"request")
        await until(lambda: KEYS[0] in stored(embedded))
        with redis.Redis.from_url(embedded.url) as client:
            client.flushall()
        made.journal.keep(KEYS[1], b"another")
        await until(lambda: stored(embedded).keys() == {KEYS[0], KEYS[1]})
        assert made.written == 3
        with redis.Redis.from_url(embedded.url) as client:
            (mark,) = client.keys("*:mark:*")
            assert client.pttl(mark) > 60_000
            client.delete(mark)
        made.journal.keep(KEYS[2], b"third")
        await until(lambda: KEYS[2] in stored(embedded))
        await asyncio.sleep(0.05)
        assert made.written == 4


async def test_a_server_that_hangs_delays_nothing(embedded: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.2)
    async with running(embedded.url) as made:
        made.journal.keep(KEYS[0], b"request")
        await until(lambda: bool(stored(embedded)))
        with stopped(embedded):
            for key in KEYS[1:]:
                with made.without_client():
                    kept = made.journal.keep(key, b"request")
                    assert kept is not None
                    made.journal.release(kept, complete=True)
                await asyncio.sleep(0)
            with pytest.raises(NodeUnavailable, match="did not answer"):  # before the client itself gives up
                await made.journal.read(KEYS[0])
        await until(lambda: len(stored(embedded)) == len(KEYS))


async def test_many_that_wait_share_a_few_connections_and_end_in_time(embedded: Embedded) -> None:
    """Mutants: each read that waits has a connection of its own; one that waits for its turn outlives its time."""
    async with running(embedded.url) as made:
        made.journal.keep(KEYS[0], b"request")
        await until(lambda: bool(stored(embedded)))
        pool = made.journal._client.connection_pool

        async def all_of_them(patience_s: float) -> list[Any]:
            reads = (made.journal.read_patiently(KEYS[0], patience_s) for _ in range(200))
            return await asyncio.gather(*reads, return_exceptions=True)

        with stopped(embedded):
            async with asyncio.timeout(2.0):
                gave_up = await all_of_them(0.5)
            waiting = asyncio.create_task(all_of_them(10.0))
            await asyncio.sleep(0.1)
        assert all(isinstance(one, NodeUnavailable) and "did not answer" in str(one) for one in gave_up)
        assert set(await waiting) == {b"request"}
        assert sum(count for count, _ in pool.get_connection_count()) <= module.READERS + 1


async def test_an_answer_of_redis_is_not_asked_for_again(embedded: Embedded) -> None:
    """Mutants: a key that is not there, or is something else, is waited for."""
    async with running(embedded.url) as made, asyncio.timeout(5.0):
        assert await made.journal.read_patiently(KEYS[0], 60.0) is None
        with redis.Redis.from_url(embedded.url) as client:
            client.lpush(PREFIX + KEYS[0], "a list")
        with pytest.raises(NodeUnavailable, match="WRONGTYPE"):
            await made.journal.read_patiently(KEYS[0], 60.0)
    for error, passes in (
        (redis.BusyLoadingError(), True),
        (redis.exceptions.MasterDownError("MASTERDOWN"), True),
        (redis.AuthenticationError(), False),
    ):
        assert may_pass(error) == passes


async def test_what_ended_long_ago_is_not_written_any_more(embedded: Embedded) -> None:
    async with running(embedded.url, ttl_s=0.5) as made:
        embedded.kill()
        kept = made.journal.keep(KEYS[0], b"request")
        assert kept is not None
        made.journal.release(kept, complete=False)
        await until(lambda: not made.journal._held)
        assert made.dropped("age") == 1
        assert not made.journal._due
        embedded.start_again()


async def test_closing_is_quick_without_redis() -> None:
    async with running("redis://127.0.0.1:1/0") as made:
        made.journal.keep(KEYS[0], b"request")
        await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 2.0


async def test_options() -> None:
    off = ServeConfig.model_validate({"journal_mode": False, "adaptive": False})  # what YAML makes of a bare off
    assert (off.journal_mode, off.adaptive) == ("off", "off")
    assert open_journal(off, "redis://127.0.0.1:1/0", KEY) is None
    made = open_journal(ServeConfig(journal_entry_bytes=7), "redis://127.0.0.1:1/0", KEY)
    assert made is not None
    assert made.keep(KEYS[0], bytes(8)) is None
    await made.close()


def test_neither_id_nor_tenant_is_in_the_key() -> None:
    assert "secret" not in journal_key("tenant", "secret" * 5)
    assert len({journal_key(*pair) for pair in (("a", "1:b"), ("a1:", "b"), ("", "a1:b"), ("b", "a"))}) == 4


async def test_redis_learns_lengths_alone_and_changes_nothing(
    embedded: Embedded, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutants: the content is not encrypted; the name is not bound; what is not sealed is taken as it is."""
    async with running(embedded.url) as made:
        secret = b"the words of a prompt"
        for key in KEYS[:2]:
            made.journal.keep(key, secret)
        await until(lambda: len(stored(embedded)) == 2)
        with redis.Redis.from_url(embedded.url) as client:
            first, second = (bytes(client.get(PREFIX + key) or b"") for key in KEYS[:2])
            assert secret[:5] not in first
            assert len(first) == len(secret) + OVERHEAD_BYTES
            assert first[len(MAGIC) :] != second[len(MAGIC) :]
            old = b"\x0a\x05hello"  # as versions before wrote it
            for wrong in (second, first[:-1] + bytes([first[-1] ^ 1]), first[:20], b"", old):
                client.set(PREFIX + KEYS[0], wrong)
                assert await made.journal.read(KEYS[0]) is None
        assert made.refused("tampered") == 3
        assert made.refused("plain") == 2
        assert f"{PREFIX + KEYS[0]} is refused" in caplog.text
        other = Journal(embedded.url, Seal("22" * 32), ttl_s=1.0, entry_bytes=100, total_bytes=1000)
        assert await other.read(KEYS[1]) is None
        await other.close()
        assert made.journal.seal.name("told", b"x") != other.seal.name("told", b"x")
        assert await made.journal.read(KEYS[1]) == secret


async def test_an_entry_that_grows_is_written_and_counted_anew(embedded: Embedded) -> None:
    async with running(embedded.url, entry_bytes=100) as made:
        journal, kept = made.journal, made.journal.keep(KEYS[0], b"a")
        assert kept is not None
        journal.update(kept, 100 * b"b")
        assert journal._bytes == 100 + ENTRY_OVERHEAD_BYTES
        await until(lambda: stored(embedded) == {KEYS[0]: 100 * b"b"})
        journal.update(kept, 101 * b"c")  # too large: another router is not to go on from less than was told
        await until(lambda: stored(embedded) == {})
        assert (journal._bytes, made.dropped("size")) == (0, 1)
        journal.update(kept, b"d")
        assert not journal._held


async def test_the_longest_of_two_routers_stays(embedded: Embedded) -> None:
    """What they were told of one plan is alike. Mutants: the last one to write counts; the longer one expires."""
    async with running(embedded.url) as one, running(embedded.url, ttl_s=300.0) as two:
        one.journal.keep(KEYS[0], 50 * b"a", spare=True)
        await until(lambda: stored(embedded) == {KEYS[0]: 50 * b"a"})
        kept = two.journal.keep(KEYS[0], 20 * b"a", spare=True)
        assert kept is not None
        await until(lambda: ttl_s(embedded, KEYS[0]) > 200)
        assert stored(embedded) == {KEYS[0]: 50 * b"a"}
        two.journal.update(kept, 60 * b"a")
        await until(lambda: stored(embedded) == {KEYS[0]: 60 * b"a"})
