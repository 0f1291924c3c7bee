"""What a sequence costs a node, and what calls in progress count for."""

from __future__ import annotations

import asyncio

from cluster.routing.cost import NO_ROOM, decode_cost, prefill_cost
from cluster.routing.policy import choose_decode, choose_prefill
from cluster.state.registry_types import NodeRecord
from tests.support.router_asks import answer, ask
from tests.support.scripted_nodes import fleet


def node(name: str, running: int = 0, free: int = 100, total: int = 100) -> NodeRecord:
    return NodeRecord(name, name.partition("-")[0], 1, "h:1", running=running, free_pages=free, total_pages=total)


def test_one_long_prompt_weighs_more_than_two_short_ones() -> None:
    nodes = [node("prefill-0"), node("prefill-1")]
    chosen = choose_prefill(nodes, {"prefill-0": 1, "prefill-1": 2}, 0, {"prefill-0": 8000, "prefill-1": 200})
    assert chosen is nodes[1]
    assert prefill_cost(nodes[0], 1, 1024) == prefill_cost(nodes[0], 2, 0)


def test_pages_weigh_by_what_is_left() -> None:
    assert decode_cost(node("decode-0", free=50), 0, 50) == decode_cost(node("decode-0", running=1), 0, 0)
    assert decode_cost(node("decode-0", free=4), 0, 5) > NO_ROOM
    assert decode_cost(node("decode-0", free=0, total=0), 3, 50) == 3.0
    nodes = [node("decode-0", running=1, free=10), node("decode-1", running=1, free=1000, total=1000)]
    assert choose_decode(nodes, {}, 10) is nodes[1]


async def test_a_prompt_is_load_until_its_first_token() -> None:
    async with fleet(prefill=2) as made:
        calls = made.router._calls
        for i in range(2):
            made.nodes[f"prefill-{i}"].script.gate = asyncio.Event()
        made.nodes["decode-0"].script.gate = asyncio.Event()
        task = asyncio.create_task(answer(made, ask(prompt="x" * 40)))
        while sum(made.nodes[f"prefill-{i}"].active for i in range(2)) < 1:
            await asyncio.sleep(0.005)
        (first,) = [name for name in calls.own if name.startswith("prefill")]
        assert (calls.own[first], calls.own_tokens[first]) == (1, 40)
        gates = made.nodes[first].script.gate, made.nodes["decode-0"].script.gate
        assert gates[0] is not None
        assert gates[1] is not None
        gates[0].set()
        while calls.own[first]:
            await asyncio.sleep(0.005)
        assert calls.own["decode-0"] == 1  # still decoding
        gates[1].set()
        await task
        assert not calls.own
        assert not calls.own_tokens
