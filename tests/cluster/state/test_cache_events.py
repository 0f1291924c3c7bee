"""From a node's prefix cache to a router's index, over a real server that loses, forgets and dies."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from cluster.state.cache_events import SNAPSHOT_EVENTS, STREAM_EVENTS, CachePublisher, CacheWatcher, _names
from cluster.state.connection import OPERATION_TIMEOUT_S
from cluster.state.registry_types import DEFAULT_NAMESPACE, NodeRecord
from paceline.kvcache.changes import MAX_CHANGES
from paceline.kvcache.keys import KEY_VERSION
from tests.fakes.redis_servers import SERVERS, Server
from tests.support.cached_prefixes import PAGE, Holder, prompt

TTL_S = 0.4
PATIENT_TTL_S = 60.0  # where what is known must not go stale between reading and looking
ANSWER_LOST = redis.ConnectionError("the answer was lost")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made = SERVERS[request.param]()
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as made:
        yield made


@pytest.fixture
def holder(server: Server) -> Iterator[Holder]:
    made = Holder(server.url, ttl_s=TTL_S)
    yield made
    made.publisher.close()


@pytest.fixture
async def watcher(server: Server, holder: Holder) -> AsyncIterator[CacheWatcher]:
    made = CacheWatcher(server.url, lambda: [holder.record], TTL_S)
    yield made
    await made.close()


def known(watcher: CacheWatcher, holder: Holder) -> set[bytes] | None:
    held = watcher.index.get(holder.name)
    return None if held is None else held.keys


async def test_a_router_follows_a_node(server: Server, holder: Holder) -> None:
    watcher = CacheWatcher(server.url, lambda: [holder.record], PATIENT_TTL_S)
    await watcher.refresh()
    assert known(watcher, holder) is None  # it has not spoken yet
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) == holder.keys() != set()
    assert watcher.index.cached_tokens([holder.record], prompt(1), "") == {holder.name: 3 * PAGE}
    for i in range(2, 9):  # the cache is small: others give way
        holder.add(prompt(i), salt=str(i))
        holder.publisher.publish()
        await watcher.refresh()
        assert known(watcher, holder) == holder.keys()
    held = watcher.index.get(holder.name)
    assert held is not None
    assert held.last_id > 8  # it followed; it did not read the whole again and again
    assert watcher.index.cached_tokens([holder.record], prompt(8), "another tenant") == {}
    await watcher.close()


async def test_an_idle_node_that_clears_its_cache_says_so(watcher: CacheWatcher, holder: Holder) -> None:
    """aibrix #2287: the event waited for a scheduler step that an idle engine never makes, and was ignored."""
    holder.add(prompt(1))
    holder.publisher.start()
    await watcher.start()
    await until(lambda: known(watcher, holder) == holder.keys())
    assert holder.keys()
    holder.cache.clear()
    await until(lambda: known(watcher, holder) == set())
    assert known(watcher, holder) == holder.keys() == set()


async def test_a_router_that_missed_too_much_reads_the_whole(
    watcher: CacheWatcher, holder: Holder, client: Any
) -> None:
    """smg #2225: a cursor that is no longer in the log left the old entries in place for good."""
    holder.add(prompt(0))
    holder.publisher.publish()
    await watcher.refresh()
    for i in range(1, STREAM_EVENTS + 9):
        holder.add(prompt(i))
        holder.publisher.publish()
    events, state = _names(DEFAULT_NAMESPACE, holder.name)
    assert client.xlen(events) == STREAM_EVENTS
    first = int(client.xrange(events, count=1)[0][0].partition(b"-")[0])
    assert first <= int(client.hget(state, "at")) <= int(client.hget(state, "head"))  # snapshot and stream overlap
    await watcher.refresh()
    assert known(watcher, holder) == holder.keys()
    assert 0 < client.ttl(events) <= 60
    assert 0 < client.ttl(state) <= 60


async def test_a_router_that_starts_late_knows_all(server: Server, holder: Holder) -> None:
    for i in range(SNAPSHOT_EVENTS + 3):
        holder.add(prompt(i))
        holder.publisher.publish()
    late = CacheWatcher(server.url, lambda: [holder.record], TTL_S)
    await late.start()
    assert known(late, holder) == holder.keys()
    await late.close()
    await late.close()


async def test_one_event_that_is_lost_is_noticed(watcher: CacheWatcher, holder: Holder, client: Any) -> None:
    for i in range(4):
        holder.add(prompt(i))
        holder.publisher.publish()
        if i == 0:
            await watcher.refresh()
    events, _ = _names(DEFAULT_NAMESPACE, holder.name)
    assert client.xdel(events, client.xrange(events)[1][0]) == 1
    await watcher.refresh()
    assert known(watcher, holder) is None  # nothing rather than what was true before
    for _ in range(SNAPSHOT_EVENTS):  # the node's next snapshot heals it
        holder.add(prompt(9))
        holder.cache.clear()
        holder.add(prompt(7))
        holder.publisher.publish()
        await watcher.refresh()
        if (held := watcher.index.get(holder.name)) is not None:
            break
    assert held is not None
    assert held.keys == holder.keys()


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not applied"])
async def test_when_an_answer_is_lost_no_number_is_used_twice(
    watcher: CacheWatcher, holder: Holder, applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dynamo #7072: a cursor at a number that meant something else."""
    holder.publisher.publish()
    await watcher.refresh()
    holder.add(prompt(1))
    run = holder.publisher._client.eval

    def broken(*arguments: Any) -> Any:
        if applied:
            run(*arguments)
        raise ANSWER_LOST

    monkeypatch.setattr(holder.publisher._client, "eval", broken)
    with pytest.raises(redis.ConnectionError):
        holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) == (holder.keys() if applied else set())
    monkeypatch.setattr(holder.publisher._client, "eval", run)
    holder.add(prompt(2))  # one more change: the same number of events as the lost ones
    holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) == holder.keys()


async def test_more_changes_than_are_kept_become_a_snapshot(server: Server) -> None:
    big = Holder(server.url, ttl_s=TTL_S, num_pages=2 * MAX_CHANGES + 64)
    watcher = CacheWatcher(server.url, lambda: [big.record], TTL_S)
    big.publisher.publish()
    await watcher.refresh()
    big.add(tuple(range((MAX_CHANGES + 5) * PAGE)))
    assert len(big.keys()) > MAX_CHANGES
    big.publisher.publish()
    await watcher.refresh()
    assert known(watcher, big) == big.keys()
    await watcher.close()
    big.publisher.close()


async def test_a_restarted_node_begins_with_nothing(server: Server, watcher: CacheWatcher, holder: Holder) -> None:
    """llm-d-router #2853: a restarted engine numbers from zero again, and its old entries stayed."""
    for i in range(5):
        holder.add(prompt(i))
        holder.publisher.publish()
    await watcher.refresh()
    holder.restart()
    await watcher.refresh()
    assert watcher.index.cached_tokens([holder.record], prompt(4), "") == {}
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.refresh()
    held = watcher.index.get(holder.name)
    assert held is not None
    assert held.keys == holder.keys()
    assert held.last_id < 5
    assert watcher.index.get(("decode-0", 1)) is None


async def test_a_node_that_leaves_takes_its_keys_along(watcher: CacheWatcher, holder: Holder, client: Any) -> None:
    """llm-d-router #1736: events still under way put entries of a removed node back."""
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.refresh()
    watcher._nodes = list
    holder.add(prompt(2))
    holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) is None
    holder.publisher.close()
    assert client.keys("*:cache:*") == []


async def test_redis_dies_and_comes_back_empty(server: Server, watcher: CacheWatcher, holder: Holder) -> None:
    holder.add(prompt(1))
    holder.publisher.start()
    await watcher.start()
    await until(lambda: known(watcher, holder) == holder.keys())
    server.kill()
    began = time.monotonic()
    holder.add(prompt(2))  # the engine waits for nothing
    assert time.monotonic() - began < OPERATION_TIMEOUT_S
    await until(lambda: watcher.index.cached_tokens([holder.record], prompt(1), "") == {})
    server.start_again()
    await until(lambda: watcher.index.cached_tokens([holder.record], prompt(2), "") == {holder.name: 3 * PAGE})
    await until(lambda: known(watcher, holder) == holder.keys())


async def test_redis_that_hangs_stalls_nobody(server: Server, watcher: CacheWatcher, holder: Holder) -> None:
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.start()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        publishing = threading.Thread(target=pytest.raises, args=(redis.RedisError, holder.publisher.publish))
        holder.add(prompt(2))
        publishing.start()
        waits: list[float] = []
        while publishing.is_alive():
            began = time.monotonic()
            holder.add(prompt(len(waits) % 8))
            watcher.index.cached_tokens([holder.record], prompt(1), "")
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
        assert len(waits) > 5
        assert max(waits) < OPERATION_TIMEOUT_S
        assert watcher.index.cached_tokens([holder.record], prompt(1), "") == {}
        await asyncio.to_thread(publishing.join)
    finally:
        os.kill(server.pid, signal.SIGCONT)
    holder.publisher.publish()
    await until(lambda: known(watcher, holder) == holder.keys())


async def test_a_redis_that_fell_back_is_brought_up_again(watcher: CacheWatcher, holder: Holder, client: Any) -> None:
    """As after a switch to a replica that lags: it has an older snapshot and older events."""
    holder.publisher.publish()
    old = {key: client.dump(key) for key in _names(DEFAULT_NAMESPACE, holder.name)}
    for i in range(3):
        holder.add(prompt(i))
        holder.publisher.publish()
        await watcher.refresh()
    for key, body in old.items():
        client.delete(key)
        if body is not None:
            client.restore(key, 60_000, body)
    holder.add(prompt(3))
    holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) == holder.keys()


async def test_a_node_that_cannot_publish_is_forgotten(watcher: CacheWatcher, holder: Holder, client: Any) -> None:
    """It keeps its lease, and its last word expires."""
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.refresh()
    assert known(watcher, holder) == holder.keys()
    for key in _names(DEFAULT_NAMESPACE, holder.name):
        client.pexpire(key, 1)
    await until(lambda: not client.keys("*:cache:*"))
    await watcher.refresh()
    assert known(watcher, holder) is None


async def test_a_log_that_is_gone_is_replaced_at_once(server: Server, holder: Holder, client: Any) -> None:
    """As when Redis runs out of memory: the snapshot is there, the events after it are not."""
    for i in range(3):
        holder.add(prompt(i))
        holder.publisher.publish()
    assert client.delete(_names(DEFAULT_NAMESPACE, holder.name)[0]) == 1
    late = CacheWatcher(server.url, lambda: [holder.record], TTL_S)
    await late.refresh()
    assert known(late, holder) is None
    holder.publisher.publish()
    await late.refresh()
    assert known(late, holder) == holder.keys()
    await late.close()


@pytest.mark.parametrize("what", ["version", "keys", "event", "head"])
async def test_what_cannot_be_read_gives_no_hint(
    watcher: CacheWatcher, holder: Holder, client: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A router and a node of different versions: better no hint than a wrong one."""
    holder.add(prompt(1))
    holder.publisher.publish()
    events, state = _names(DEFAULT_NAMESPACE, holder.name)
    if what == "version":
        body = client.hget(state, "scheme").replace(b'"version": %d' % KEY_VERSION, b'"version": 99')
        client.hset(state, "scheme", body)
    elif what == "keys":
        client.hset(state, "keys", b"123")
    elif what == "event":
        client.xadd(events, {"kind": "moved", "keys": b""}, id="2-0")
    else:
        client.hset(state, "head", "many")
    if what in ("event", "head"):
        await watcher.refresh()
        client.hset(state, "keys", b"123")
    for _ in range(3):
        await watcher.refresh()
    assert known(watcher, holder) is None
    assert sum("cannot be read" in record.message for record in caplog.records) == 1


async def test_a_node_without_prefix_cache_is_no_trouble(server: Server, holder: Holder) -> None:
    silent = NodeRecord("prefill-0", "prefill", 1, "h:1")
    watcher = CacheWatcher(server.url, lambda: [silent, holder.record], PATIENT_TTL_S)
    holder.add(prompt(1))
    holder.publisher.publish()
    await watcher.refresh()
    found = watcher.index.cached_tokens([silent, holder.record], prompt(1), "")
    assert found == {holder.name: 3 * PAGE}
    await watcher.close()


def test_a_fault_of_the_cache_does_not_end_the_publisher(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    holder = Holder(server.url, ttl_s=TTL_S)
    take, calls = holder.cache.take_changes, []

    def faulty(whole: bool, max_keys: int) -> Any:
        calls.append(whole)
        if len(calls) < 3:
            raise RuntimeError("a bug")
        return take(whole, max_keys)

    holder.cache.take_changes = faulty  # type: ignore[method-assign]
    publisher = CachePublisher(server.url, holder.name, holder.cache, 0.04)
    with caplog.at_level("INFO"):
        publisher.start()
        end = time.monotonic() + 5
        while len(calls) < 4 and time.monotonic() < end:
            time.sleep(0.01)
        publisher.close()
        publisher.close()
    assert calls[:4] == [False, False, False, True]  # the first that is published is a snapshot
    assert [r.message.partition(": its")[0] for r in caplog.records if "published" in r.message] == ["decode-0"] * 2


async def until(condition: Any, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.01)
