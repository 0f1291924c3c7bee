"""Nodes chosen for what they have cached, as long as their load allows."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.routing.cost import NO_ROOM, PROMPT_WEIGHT, TRANSFER_WEIGHT, decode_cost, prefill_cost
from cluster.routing.policy import PromptHint, choose_decode, choose_prefill
from cluster.state.prefix_index import NodeKeys, PrefixIndex, Snapshot
from cluster.state.registry_types import NodeRecord
from paceline.kvcache.keys import KeyScheme
from tests.support.router_asks import answer, ask
from tests.support.scripted_nodes import Fleet, fleet

PAGE = 16
SCHEME = KeyScheme(PAGE, 1, "tiny")
PROMPT = "p" * 65  # four pages, and one token of lookahead
TENANT = "some tenant"


def node(name: str, running: int = 0, free: int = 1000) -> NodeRecord:
    return NodeRecord(name, name.partition("-")[0], 1, "h:1", running=running, free_pages=free, total_pages=1000)


def hint(num_tokens: int, **cached: int) -> PromptHint:
    return PromptHint(num_tokens, PAGE, {(name.replace("_", "-"), 1): tokens for name, tokens in cached.items()})


def test_what_is_cached_need_not_be_computed() -> None:
    nodes = [node("prefill-0"), node("prefill-1")]
    for turn in range(3):
        chosen = choose_prefill(nodes, {}, turn, prompt=hint(100, prefill_1=16))
        assert chosen is nodes[1]
    assert prefill_cost(nodes[0], 0, 100, 412) == 512 * PROMPT_WEIGHT
    assert choose_prefill(nodes, {}, prompt=hint(3000, prefill_0=64, prefill_1=2048)) is nodes[1]


def test_a_hit_is_worth_so_many_sequences_and_no_more() -> None:
    prompt = hint(2048, prefill_0=2032)
    assert choose_prefill([node("prefill-0", running=1), node("prefill-1")], {}, prompt=prompt) == node(
        "prefill-0", running=1
    )
    assert choose_prefill([node("prefill-0", running=2), node("prefill-1")], {}, prompt=prompt) == node("prefill-1")
    assert choose_prefill([node("prefill-0"), node("prefill-1")], {}, 0, {"prefill-0": 2033}, prompt) == node(
        "prefill-1"
    )


@pytest.mark.parametrize(("num_tokens", "most"), [(64, 1), (1024, 2), (8192, 9)])
def test_a_hot_prefix_does_not_pile_up_on_its_node(num_tokens: int, most: int) -> None:
    """production-stack #1035: every request for a hot prefix landed on the one engine that held it."""
    nodes, own, prompt = [node("prefill-0"), node("prefill-1")], Counter[str](), hint(num_tokens, prefill_0=num_tokens)
    for turn in range(100):
        chosen = choose_prefill(nodes, own, turn, prompt=prompt)
        assert chosen is not None
        own[chosen.id] += 1
        assert own["prefill-0"] - own["prefill-1"] <= most
    assert own["prefill-0"] >= own["prefill-1"]


def test_decode_counts_pages_that_are_new_and_rows_that_come() -> None:
    one = node("decode-0", free=50)
    assert decode_cost(one, 0, 50, 25) == pytest.approx(0.5)
    assert decode_cost(one, 0, 50, 99) == 0.0
    assert decode_cost(one, 0, 0, 0, 8192) == pytest.approx(1.0)
    assert decode_cost(one, 0, 0, 0, 8192, PROMPT_WEIGHT) == pytest.approx(8.0)
    assert decode_cost(replace(one, total_pages=0), 3, 50, 0, 8192) == pytest.approx(4.0)
    assert TRANSFER_WEIGHT < PROMPT_WEIGHT
    nodes = [node("decode-0"), node("decode-1")]
    for turn in range(2):
        assert choose_decode(nodes, {}, 10, turn, hint(100, decode_1=PAGE)) is nodes[1]
    assert choose_decode([node("decode-0"), node("decode-1", running=1)], {}, 10, 0, hint(100, decode_1=96)) == nodes[0]


def test_pages_that_are_cached_make_no_room() -> None:
    """They may be the free ones: then they are no more free once they are used."""
    full = node("decode-0", free=40)
    assert decode_cost(full, 0, 50, 30) > NO_ROOM
    chosen = choose_decode([full, node("decode-1", running=5)], {}, 50, 0, hint(800, decode_0=480))
    assert chosen == node("decode-1", running=5)


def test_equals_still_take_turns() -> None:
    nodes = [node(f"prefill-{i}") for i in range(3)]
    for prompt in (hint(500), hint(500, prefill_0=64, prefill_1=64, prefill_2=64), hint(0)):
        chosen = [choose_prefill(nodes, {}, turn, prompt=prompt) for turn in range(6)]
        assert [c.id for c in chosen if c is not None] == [f"prefill-{i % 3}" for i in range(6)]
    two = [choose_prefill(nodes, {}, turn, prompt=hint(500, prefill_0=64, prefill_2=64)) for turn in range(4)]
    assert [c.id for c in two if c is not None] == ["prefill-0", "prefill-2"] * 2


def test_a_hint_is_never_more_than_the_prompt_nor_of_another_generation() -> None:
    prompt = PromptHint(10, PAGE, {("decode-0", 1): 64, ("decode-1", 2): 64})
    assert prompt.cached_tokens(node("decode-0")) == 10
    assert prompt.missing_tokens(node("decode-0")) == 0
    assert prompt.missing_tokens(node("decode-1")) == 10
    assert prompt.cached_tokens(replace(node("decode-1"), generation=2)) == 10
    assert prompt.cached_tokens(replace(node("decode-0"), generation=2)) == 0


def cached_on(made: Fleet, index: PrefixIndex, node_id: str, salt: str = TENANT) -> None:
    keys = tuple(SCHEME.keys(tuple(PROMPT.encode()), salt, 4))
    index.put((node_id, made.nodes[node_id].record.generation), NodeKeys.of(Snapshot(1, SCHEME, keys)))
    index.confirm(60.0)


def counted(made: Fleet) -> dict[tuple[str, str], float]:
    """By name and role."""
    families = text_string_to_metric_families(made.router.metrics.render().decode())
    samples = [sample for family in families if family.name.startswith("paceline_prefix") for sample in family.samples]
    return {
        (sample.name.removeprefix("paceline_prefix_").removesuffix("_total"), sample.labels["role"]): sample.value
        for sample in samples
        if sample.name.endswith("_total")
    }


async def test_requests_go_where_their_prompt_is_and_it_is_counted() -> None:
    index = PrefixIndex()
    async with fleet(prefill=2, decode=2, prefixes=index) as made:
        cached_on(made, index, "prefill-1")
        cached_on(made, index, "decode-0")
        made.nodes["prefill-1"].script.cached_tokens = 64
        made.nodes["decode-0"].script.cached_tokens = 48  # a hint is no promise
        for _ in range(3):
            done = await answer(made, ask(prompt=PROMPT, tenant=TENANT))
            assert (done.completion.nodes.prefill, done.completion.nodes.decode) == ("prefill-1", "decode-0")
        assert counted(made) == {
            ("hint_tokens", "prefill"): 192,
            ("hit_tokens", "prefill"): 192,
            ("hint_tokens", "decode"): 192,
            ("hit_tokens", "decode"): 144,
        }
        trace = await made.router.trace(done.completion.request_id)
        (attempt,) = [event for event in trace.events if event.name == "attempt"]
        assert (attempt.attributes["prefill_hint_tokens"], attempt.attributes["decode_hint_tokens"]) == (64, 64)
        others = {(await served(made, ask(prompt=PROMPT, tenant="another"))) for _ in range(4)}
        assert len(others) == 2  # to whom it means nothing


async def test_without_news_load_alone_decides() -> None:
    index = PrefixIndex()
    async with fleet(prefill=2, decode=2, prefixes=index) as made:
        cached_on(made, index, "prefill-1")
        index.confirm(0.0)
        assert len({(await served(made, ask(prompt=PROMPT, tenant=TENANT))) for _ in range(4)}) == 2


async def test_only_what_is_not_cached_is_load() -> None:
    index = PrefixIndex()
    async with fleet(prefill=2, decode=1, prefixes=index) as made:
        cached_on(made, index, "prefill-1")
        gate = made.nodes["prefill-1"].script.gate = asyncio.Event()
        task = asyncio.create_task(answer(made, ask(prompt=PROMPT, tenant=TENANT)))
        calls = made.router._calls
        while not calls.own["prefill-1"]:
            await asyncio.sleep(0.005)
        assert calls.own_tokens["prefill-1"] == 1
        gate.set()
        await task
        assert not calls.own_tokens


@pytest.mark.parametrize(("prefill", "best"), [(0, "decode-1"), (1, "decode-0")])
async def test_where_decode_computes_the_prompt_a_hit_there_weighs_more(prefill: int, best: str) -> None:
    index = PrefixIndex()
    async with fleet(prefill=prefill, decode=2, prefixes=index) as made:
        cached_on(made, index, "decode-1")
        for node_id, free in (("decode-0", 1000), ("decode-1", 20)):
            made.registry.records[node_id] = replace(made.registry.records[node_id], free_pages=free, total_pages=1000)
        assert (await served(made, ask(prompt=PROMPT, tenant=TENANT)))[1] == best


async def test_a_stream_that_is_made_again_is_looked_up_with_what_it_has_said() -> None:
    class Spy(PrefixIndex):
        asked: list[int] = []  # noqa: RUF012

        def cached_tokens(self, nodes: Any, token_ids: Any, salt: str) -> Any:
            self.asked.append(len(token_ids))
            return super().cached_tokens(nodes, token_ids, salt)

    index = Spy()
    async with fleet(prefill=1, decode=2, prefixes=index) as made:
        for i in range(2):
            made.nodes[f"decode-{i}"].script.die_after = 6
        await answer(made, ask(20, prompt=PROMPT))
        assert index.asked[0] == 65
        assert index.asked == sorted(index.asked)
        assert index.asked[-1] > 65


async def test_who_is_asked_what_it_made() -> None:
    """Also a node that drains. Mutants: prefill nodes are asked; the first nodes are, wherever the prompt is."""
    index = PrefixIndex()
    async with fleet(prefill=1, decode=3, prefixes=index) as made:
        cached_on(made, index, "decode-2")
        made.set_state("decode-2", "draining")
        tokens = tuple(PROMPT.encode())
        likely = made.router._pairing.likely
        assert [node.id for node in likely(tokens, TENANT, 9)] == ["decode-2", "decode-0", "decode-1"]
        assert [node.id for node in likely(tokens, TENANT, 1)] == ["decode-2"]
        assert [node.id for node in likely(tokens, "another", 2)] == ["decode-0", "decode-1"]


async def served(made: Fleet, request: Any) -> tuple[str, str]:
    done = await answer(made, request)
    return done.completion.nodes.prefill, done.completion.nodes.decode
