"""Choosing nodes."""

from __future__ import annotations

import pytest

from cluster.routing.policy import choose_decode, choose_prefill
from cluster.state.registry_types import NodeRecord


def node(name: str, running: int = 0, waiting: int = 0, free: int = 100) -> NodeRecord:
    role = name.partition("-")[0]
    return NodeRecord(name, role, 1, "h:1", running=running, waiting=waiting, free_pages=free, total_pages=100)


def test_none_of_none() -> None:
    assert choose_decode([], {}, 1) is None
    assert choose_prefill([], {}) is None


@pytest.mark.parametrize(
    ("nodes", "own", "best"),
    [
        ([node("decode-0", running=2), node("decode-1", running=1)], {}, "decode-1"),
        ([node("decode-0", running=1), node("decode-1", waiting=2)], {}, "decode-0"),
        ([node("decode-0"), node("decode-1")], {"decode-0": 1}, "decode-1"),
        # The registry's count already holds the own calls: the larger of both, not the sum.
        ([node("decode-0", running=3), node("decode-1", running=4)], {"decode-0": 3}, "decode-0"),
        ([node("decode-0", free=10), node("decode-1", free=90)], {}, "decode-1"),
        # Without room for its pages it would wait, however idle the node is.
        ([node("decode-0", free=4), node("decode-1", running=9, free=5)], {}, "decode-1"),
        ([node("decode-0", free=4), node("decode-1", free=3)], {}, "decode-0"),
    ],
)
def test_the_least_loaded_decode_node(nodes: list[NodeRecord], own: dict[str, int], best: str) -> None:
    chosen = choose_decode(nodes, own, 5)
    assert chosen is not None
    assert chosen.id == best


def test_ties_rotate() -> None:
    nodes = [node(f"prefill-{i}") for i in range(3)]
    chosen = [choose_prefill(nodes, {}, turn) for turn in range(6)]
    assert [c.id for c in chosen if c is not None] == [f"prefill-{i % 3}" for i in range(6)]
    busy = {"prefill-1": 1}
    chosen = [choose_prefill(nodes, busy, turn) for turn in range(4)]
    assert {c.id for c in chosen if c is not None} == {"prefill-0", "prefill-2"}
