"""Any order of stores, evictions, clears, losses and restarts: once it is quiet, router and node agree.

Over a real server, two routers: one that reads now and then, one that is started anew. Whatever a router knows in
between is what the node held after the event that it has read to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from cluster.state import cache_events
from cluster.state.cache_events import CacheWatcher, _names
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.registry_types import DEFAULT_NAMESPACE
from tests.support.cached_prefixes import Holder, prompt

PROMPT = st.integers(0, 7).map(prompt)


class CacheEventsMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = redis.Redis.from_url(self.url)
        self.client.flushall()
        self.holder = Holder(self.url, ttl_s=60.0, max_changes=10)
        self.states: dict[int, set[bytes]] = {}  # by the number of an event: what the cache held after it
        self.torn = False  # an event is missing from the middle of the log, until the next snapshot
        self.watcher = self.new_watcher()

    def new_watcher(self) -> CacheWatcher:
        return CacheWatcher(self.url, lambda: [self.holder.record], 60.0)

    @rule(token_ids=PROMPT, tenant=st.sampled_from(["", "tenant"]))
    def add(self, token_ids: tuple[int, ...], tenant: str) -> None:
        self.holder.add(token_ids, tenant)

    @rule(pages=st.integers(1, 4))
    def evict(self, pages: int) -> None:
        self.holder.cache.evict(pages)

    @rule()
    def clear(self) -> None:
        self.holder.cache.clear()

    @rule()
    def publish(self) -> None:
        before = self.holder.publisher._head
        self.holder.publisher.publish()
        if self.holder.publisher._head > before:
            self.states[self.holder.publisher._head] = self.holder.keys()

    @rule(applied=st.booleans())
    def publish_without_an_answer(self, applied: bool) -> None:
        publisher = self.holder.publisher
        run, before, lost = publisher._client.eval, publisher._head, []

        def broken(*arguments: Any) -> Any:
            if applied:
                run(*arguments)
            lost.append(True)
            raise redis.ConnectionError("the answer was lost")

        with mock.patch.object(publisher._client, "eval", broken), pytest.raises(redis.ConnectionError):
            publisher.publish()
        assert lost
        if publisher._head > before:
            self.states[publisher._head] = self.holder.keys()

    @rule()
    def lose_all_data(self) -> None:
        self.client.flushall()

    @rule(which=st.integers(0, 1))
    def lose_a_key(self, which: int) -> None:
        """As when memory runs out."""
        self.client.delete(_names(DEFAULT_NAMESPACE, self.holder.name)[which])

    @precondition(lambda self: self.client.xlen(_names(DEFAULT_NAMESPACE, self.holder.name)[0]))
    @rule(data=st.data())
    def lose_an_event(self, data: st.DataObject) -> None:
        events = _names(DEFAULT_NAMESPACE, self.holder.name)[0]
        numbers = [number for number, _ in self.client.xrange(events) or () if number is not None]
        assert self.client.xdel(events, data.draw(st.sampled_from(numbers))) == 1
        self.torn = True

    @rule()
    def read(self) -> None:
        self.loop.run_until_complete(self.watcher.refresh())

    @rule()
    def restart_the_router(self) -> None:
        self.loop.run_until_complete(self.watcher.close())
        self.watcher = self.new_watcher()
        self.read()

    @rule()
    def restart_the_node(self) -> None:
        self.holder.publisher._client.close()
        self.holder.restart()
        self.states = {}
        self.read()

    @invariant()
    def what_is_known_was_true(self) -> None:
        held = self.watcher.index.get(self.holder.name)
        if held is not None and held.last_id in self.states:
            assert held.keys == self.states[held.last_id]

    def teardown(self) -> None:
        try:
            late = self.new_watcher()
            for _ in range(cache_events.SNAPSHOT_EVENTS + 2 if self.torn else 1):
                self.add(prompt(8), "")
                self.publish()
                self.clear()
                self.add(prompt(9), "")
                self.publish()
                self.read()
            self.loop.run_until_complete(late.refresh())
            for watcher in (self.watcher, late):
                held = watcher.index.get(self.holder.name)
                assert held is not None
                assert held.keys == self.holder.keys()
            self.loop.run_until_complete(late.close())
        finally:
            self.loop.run_until_complete(self.watcher.close())
            self.loop.close()
            self.holder.publisher._client.close()
            self.client.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    monkeypatch.setattr(cache_events, "STREAM_EVENTS", 6)
    monkeypatch.setattr(cache_events, "SNAPSHOT_EVENTS", 3)
    with EmbeddedRedis() as made:
        yield made


def test_any_order_of_changes_and_losses_ends_in_agreement(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheEventsMachine, "url", server.url)
    options = settings(max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(CacheEventsMachine, settings=options)
