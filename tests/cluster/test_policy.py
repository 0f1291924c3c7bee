"""Which node serves, from what the registry says and what the router has under way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cluster.policy import choose_decode, choose_prefill, decode_cost, load
from cluster.registry_types import NodeRecord


def node(name: str, **changes: Any) -> NodeRecord:
    role = "decode" if name.startswith("d") else "prefill"
    content: dict[str, Any] = {"free_pages": 100, "total_pages": 100, **changes}
    return NodeRecord(name, role, 1, f"host:{name}", **content)


def test_nobody_is_none() -> None:
    assert choose_decode([], {}, 1) is None
    assert choose_prefill([], {}) is None


def test_load_is_what_is_known_to_be_more() -> None:
    assert load(node("d0", running=2, waiting=3), own=1) == 5
    assert load(node("d0", running=2, waiting=3), own=9) == 9


@pytest.mark.parametrize(
    ("nodes", "own", "chosen"),
    [
        ([node("d0", running=2), node("d1", running=1)], {}, "d1"),
        ([node("d0", waiting=2), node("d1", running=1)], {}, "d1"),
        ([node("d0"), node("d1", running=1)], {"d0": 4}, "d1"),  # the registry has not heard of ours yet
        ([node("d0", free_pages=10), node("d1", free_pages=90)], {}, "d1"),
        ([node("d0", running=1, free_pages=100), node("d1", free_pages=10)], {}, "d1"),  # load before pages
        ([node("d0", free_pages=3), node("d1", running=30)], {}, "d1"),  # d0 has no room for 4
        ([node("d0", free_pages=3, running=9), node("d1", free_pages=3)], {}, "d1"),  # no room anywhere: least load
        ([node("d0", free_pages=4), node("d1", free_pages=3)], {}, "d0"),  # exactly enough is enough
    ],
)
def test_decode(nodes: list[NodeRecord], own: Mapping[str, int], chosen: str) -> None:
    for turn in range(3):
        got = choose_decode(nodes, own, 4, turn)
        assert got is not None
        assert got.id == chosen


def test_prefill_does_not_look_at_pages() -> None:
    got = choose_prefill([node("p0", free_pages=0), node("p1", running=1)], {})
    assert got is not None
    assert got.id == "p0"


def test_equals_take_turns() -> None:
    nodes = [node("d0"), node("d1"), node("d2", running=1), node("d3")]
    got = [choose_decode(nodes, {}, 1, turn) for turn in range(6)]
    assert [n.id for n in got if n is not None] == ["d0", "d1", "d3"] * 2


def test_a_node_that_says_nothing_of_pages_is_not_full() -> None:
    assert decode_cost(node("d0", free_pages=0, total_pages=0), 0, 1000) == 0


def test_choosing_one_by_one_spreads_evenly() -> None:
    nodes, own = [node(f"d{i}") for i in range(4)], dict.fromkeys(("d0", "d1", "d2", "d3"), 0)
    for turn in range(40):
        got = choose_decode(nodes, own, 1, turn)
        assert got is not None
        own[got.id] += 1
    assert set(own.values()) == {10}
