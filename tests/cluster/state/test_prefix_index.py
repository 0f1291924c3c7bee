"""The router's index: which node has how much of a prompt, from numbered events, with nothing stale."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.state import prefix_index
from cluster.state.prefix_index import CacheEvent, Key, Kind, NodeKeys, PrefixIndex, Snapshot, numbered
from cluster.state.registry_types import NodeRecord
from paceline.kvcache.changes import CacheChanges
from paceline.kvcache.keys import KeyScheme

SCHEME = KeyScheme(4, 0, "model")
PROMPT = tuple(range(100, 117))  # four whole pages and one token


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def node(name: str, generation: int = 1) -> NodeRecord:
    return NodeRecord(name, name.partition("-")[0], generation, "h:1")


def keys(pages: int, scheme: KeyScheme = SCHEME, salt: str = "") -> tuple[bytes, ...]:
    return tuple(scheme.keys(PROMPT, salt, pages))


def index_of(holdings: dict[Key, tuple[KeyScheme, tuple[bytes, ...]]], clock: Clock | None = None) -> PrefixIndex:
    index = PrefixIndex(clock or Clock())
    for name, (scheme, held) in holdings.items():
        index.put(name, NodeKeys.of(Snapshot(1, scheme, held)))
    index.confirm(1.0)
    return index


NODES = [node("decode-0"), node("decode-1"), node("decode-2")]


def test_the_longest_run_of_each_node() -> None:
    index = index_of({("decode-0", 1): (SCHEME, keys(2)), ("decode-1", 1): (SCHEME, keys(4))})
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 8, ("decode-1", 1): 16}
    assert index.cached_tokens(NODES, PROMPT[:16], "") == {("decode-0", 1): 8, ("decode-1", 1): 12}  # one is computed
    assert index.cached_tokens(NODES[:1], PROMPT, "") == {("decode-0", 1): 8}
    assert index.cached_tokens(NODES, (), "") == {}
    gap = index_of({("decode-0", 1): (SCHEME, keys(4)[:1] + keys(4)[2:])})
    assert gap.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 4}


def test_each_node_is_asked_with_its_own_scheme() -> None:
    """Page size, drafter and with it lookahead and namespace may differ between roles and versions."""
    drafts = KeyScheme(2, 3, "model/eagle")
    index = index_of({("decode-0", 1): (SCHEME, keys(4)), ("decode-1", 1): (drafts, keys(5, drafts))})
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 16, ("decode-1", 1): 10}
    other = index_of({("decode-0", 1): (replace(SCHEME, namespace="another model"), keys(4))})
    assert other.cached_tokens(NODES, PROMPT, "") == {}


def test_a_tenant_sees_its_own_pages_only() -> None:
    """sglang #24568: events without the cache salt told one tenant's router of another's pages."""
    index = index_of({("decode-0", 1): (SCHEME, keys(4, salt="a")), ("decode-1", 1): (SCHEME, keys(1, salt="b"))})
    assert index.cached_tokens(NODES, PROMPT, "a") == {("decode-0", 1): 16}
    assert index.cached_tokens(NODES, PROMPT, "b") == {("decode-1", 1): 4}
    assert index.cached_tokens(NODES, PROMPT, "") == {}


def test_without_news_it_answers_nothing() -> None:
    clock = Clock()
    index = index_of({("decode-0", 1): (SCHEME, keys(4))}, clock)
    clock.now = 0.99
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 16}
    clock.now = 1.0
    assert index.cached_tokens(NODES, PROMPT, "") == {}
    index.confirm(1.0)
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 16}


def test_a_node_that_is_gone_or_new_has_nothing() -> None:
    """llm-d-router #1736 and llm-d-router #2853: entries outlived their node, or its restart."""
    index = index_of({("decode-0", 1): (SCHEME, keys(4)), ("decode-1", 1): (SCHEME, keys(2))})
    assert index.cached_tokens([node("decode-0", 2), NODES[1]], PROMPT, "") == {("decode-1", 1): 8}
    index.retain([("decode-0", 2)])
    assert index.get(("decode-0", 1)) is None
    assert index.get(("decode-1", 1)) is None
    index.forget(("decode-1", 1))


def test_a_gap_is_seen_and_what_is_old_changes_nothing() -> None:
    held = NodeKeys(SCHEME, last_id=4)
    stored = CacheEvent(5, "stored", (b"a",))
    assert held.follow([stored, CacheEvent(6, "removed", (b"b",))])  # of a key that was never there
    assert held.follow([stored, CacheEvent(1, "cleared"), CacheEvent(6, "removed", (b"a",))])  # again, out of order
    assert (held.keys, held.last_id) == ({b"a"}, 6)
    assert not held.follow([CacheEvent(7, "stored", (b"c",)), CacheEvent(9, "cleared"), CacheEvent(8, "cleared")])
    assert (held.keys, held.last_id) == ({b"a", b"c"}, 7)


def test_no_page_needs_another_to_be_known() -> None:
    """llm-d-kv-cache #372: after a router's restart pages whose parents it had missed were dropped for good."""
    held = NodeKeys(SCHEME, last_id=9)
    assert held.follow([CacheEvent(10, "stored", keys(4)[2:])])
    index = PrefixIndex(Clock())
    index.put(("decode-0", 1), held)
    index.confirm(1.0)
    assert index.cached_tokens(NODES, PROMPT, "") == {}
    assert held.follow([CacheEvent(11, "stored", keys(2))])
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 16}


def test_keys_and_lookups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = NodeKeys.of(Snapshot(1, SCHEME, keys(4)), max_keys=3)
    assert held.keys == set(keys(3))
    held.follow([CacheEvent(2, "stored", (b"x",)), CacheEvent(3, "removed", keys(2)), CacheEvent(4, "stored", (b"y",))])
    assert held.keys == {keys(3)[2], b"y"}
    monkeypatch.setattr(prefix_index, "MAX_LOOKUP_PAGES", 2)
    index = index_of({("decode-0", 1): (SCHEME, keys(4))})
    assert index.cached_tokens(NODES, PROMPT, "") == {("decode-0", 1): 8}


EVENT = st.tuples(
    st.sampled_from(["stored", "stored", "removed", "cleared"]), st.sets(st.integers(0, 6).map(lambda n: bytes([n])))
)


@settings(deadline=None)
@given(
    happened=st.lists(EVENT, max_size=12),
    delivered=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), max_size=8),
)
def test_whatever_is_lost_or_repeated_a_snapshot_puts_it_right(
    happened: list[tuple[Kind, set[bytes]]], delivered: list[tuple[int, int]]
) -> None:
    """dynamo #7072: a snapshot that was not numbered like the events made every later event a gap again."""
    states, events = [frozenset[bytes]()], list[CacheEvent]()
    for kind, found in happened:
        last = states[-1]
        changed = {"stored": last | found, "removed": last - found, "cleared": frozenset()}[kind]
        states.append(frozenset(changed))
        events.append(CacheEvent(len(states) - 1, kind, () if kind == "cleared" else tuple(found)))
    held = NodeKeys(SCHEME, 0)
    for start, end in delivered:
        before = held.last_id
        if not held.follow(events[start:end]):
            assert start > before
            at = min(end, len(events))
            held = NodeKeys.of(Snapshot(at, SCHEME, tuple(states[at])))
        assert held.last_id >= before
        assert held.keys == states[held.last_id]
    assert held.follow(events[held.last_id :])
    assert held.keys == states[-1]


def test_changes_become_events_in_the_order_in_which_they_hold() -> None:
    changes = CacheChanges(cleared=True, removed=(b"r",), stored=(b"s",))
    assert numbered(7, changes) == [
        CacheEvent(8, "cleared"),
        CacheEvent(9, "removed", (b"r",)),
        CacheEvent(10, "stored", (b"s",)),
    ]
    assert numbered(7, CacheChanges()) == []
