"""The store of answers: never more than its bounds, and nobody drives out another tenant's."""

from __future__ import annotations

import random

from cluster.contract.generation import ChatMessage
from cluster.frontdoor.responses.store import Kept, Store


def kept(size: int = 1) -> Kept:
    return Kept({}, (), (ChatMessage("user", "x" * (size - 2)),))


def test_the_oldest_gives_way() -> None:
    store = Store(max_answers=3, max_bytes=10_000)
    for name in "abc":
        store.keep("t", name, kept())
    assert store.find("t", "a") is not None  # it was asked for: b is the oldest now
    store.keep("t", "d", kept())
    assert [name for name in "abcd" if store.find("t", name)] == ["a", "c", "d"]


def test_bytes_are_bounded() -> None:
    store = Store(max_answers=100, max_bytes=1000)
    for i in range(20):
        store.keep("t", str(i), kept(300))
    assert [i for i in range(20) if store.find("t", str(i))] == [17, 18, 19]
    store.keep("t", "huge", kept(1001))
    assert store.find("t", "huge") is None
    assert store.find("t", "19") is not None  # and nothing was driven out for it


def test_a_tenant_that_floods_loses_its_own() -> None:
    store = Store(max_answers=10, max_bytes=10_000)
    store.keep("quiet", "a", kept(3000))
    store.keep("quiet", "b", kept())
    for i in range(100):
        store.keep("loud", str(i), kept())
    assert store.find("quiet", "a") is not None
    assert store.find("quiet", "b") is not None
    assert sum(store.find("loud", str(i)) is not None for i in range(100)) == 8


def test_an_id_is_its_tenants_alone() -> None:
    store = Store()
    store.keep("a", "id", kept())
    assert store.find("b", "id") is None
    assert not store.drop("b", "id")
    assert store.drop("a", "id")
    assert store.find("a", "id") is None


def test_books_are_right_whatever_happens() -> None:
    rng, store = random.Random(5), Store(max_answers=20, max_bytes=3000)
    for _ in range(3000):
        tenant, name = rng.choice("abcd"), str(rng.randrange(30))
        if rng.random() < 0.7:
            store.keep(tenant, name, kept(rng.randrange(2, 700)))
        else:
            store.drop(tenant, name)
        held = [(t, size) for t, answers in store._tenants.items() for _, size in answers.values()]
        assert len(held) <= 20
        assert sum(size for _, size in held) <= 3000
        assert {t: sum(s for u, s in held if u == t) for t, _ in held} == store._bytes
