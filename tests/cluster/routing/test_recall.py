"""Who is asked for tokens that a client was told and cannot send back, and for how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from cluster.contract.generation import GenerationRequest, ReceivedChoice
from cluster.contract.plan import Plan, ServedModel, make_plan
from cluster.routing.node_calls import NodeCalls
from cluster.routing.recall import LEAST_WAIT_S, MAX_NODES, MOST_WAIT_S, Recall
from cluster.state.journal import Journal
from cluster.state.registry_types import NodeRecord
from cluster.state.sealing import Seal
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable
from paceline.request import SamplingParams
from paceline.v1 import common_pb2, inference_pb2
from paceline.wire import sequence_digest, sequence_to_proto
from tests.support.byte_text import VOCAB, ByteTokenizer
from tests.support.scripted_nodes import MAX_MODEL_LEN, Fleet, fleet


class SlowJournal(Journal):
    """One that says ``entry`` after ``after_s``, or never."""

    def __init__(self, entry: bytes | None = None, after_s: float = 0.0) -> None:
        super().__init__("redis://127.0.0.1:1/0", Seal("11" * 32), ttl_s=60.0, entry_bytes=10_000, total_bytes=100_000)
        self.entry, self.after_s, self.asked = entry, after_s, 0

    async def read_patiently(self, key: str, patience_s: float) -> bytes | None:
        self.asked += 1
        await asyncio.sleep(min(self.after_s, patience_s))
        if self.after_s >= patience_s:
            raise NodeUnavailable("Redis is away")
        return self.entry


def entry(*token_ids: int, logprobs: int = 0) -> bytes:
    told = [common_pb2.TokenLogprobs(logprob=-1.0)] * logprobs
    choice = inference_pb2.Choice(index=0, token_ids=token_ids, logprobs=told)
    return inference_pb2.GenerateResponse(choices=[choice]).SerializeToString()


async def make(**sampling: Any) -> Plan:
    asked = GenerationRequest("hello", max_tokens=100, sampling=SamplingParams(**sampling))
    served = ServedModel("tiny", MAX_MODEL_LEN, VOCAB, (), ServeConfig(model="tiny"))
    return await make_plan(asked, served, ByteTokenizer(), None)


@pytest.fixture
async def plan() -> Plan:
    return await make()


@pytest.fixture
async def nodes() -> AsyncIterator[Fleet]:
    async with fleet(decode=3) as made:
        yield made


def having(number: int, *token_ids: int) -> dict[int, ReceivedChoice]:
    return {0: ReceivedChoice(0, number, token_ids)}


def digest(plan: Plan, choice: int = 0) -> bytes:
    return sequence_digest(sequence_to_proto(plan.sequences[choice]))


async def ask(journal: Journal | None, nodes: Fleet | None, plan: Plan, had: dict[int, ReceivedChoice]) -> list[Any]:
    """Tokens that are known, and how long it took."""
    calls = NodeCalls()

    def find(token_ids: Sequence[int], salt: str, most: int) -> list[NodeRecord]:
        assert (list(token_ids), salt, most) == (
            list(plan.sequences[0].prompt_token_ids),
            plan.sequences[0].cache_salt,
            MAX_NODES,
        )
        return [one.record for name, one in nodes.nodes.items() if "decode" in name] if nodes is not None else []

    began = time.monotonic()
    found = await Recall(journal, find, calls)(plan, had)
    took = time.monotonic() - began
    await calls.close()
    return [list(found[0].token_ids), took]


async def test_whoever_knows_most_is_believed(nodes: Fleet, plan: Plan) -> None:
    """A node of an older version, one that knows nothing, one that knows more than Redis. Mutants: the first answer
    alone counts; a node's error ends the resume; more is taken than the client has."""
    nodes.nodes["decode-1"].made = {}
    nodes.nodes["decode-2"].made = {digest(plan): list(range(50))}
    found, _ = await ask(SlowJournal(entry(*range(20))), nodes, plan, having(40))
    assert found == list(range(40))
    found, _ = await ask(SlowJournal(entry(*range(95)), after_s=0.2), nodes, plan, having(90))
    assert found == list(range(90))


async def test_nobody_is_waited_for_once_all_is_known(nodes: Fleet, plan: Plan) -> None:
    """Mutant: a Redis that is away is waited for though a node has told everything."""
    nodes.nodes["decode-2"].made = {digest(plan): list(range(90))}
    found, took = await ask(SlowJournal(after_s=60.0), nodes, plan, having(90))
    assert found == list(range(90))
    assert took < MOST_WAIT_S / 2


async def test_a_wait_is_worth_its_tokens(nodes: Fleet, plan: Plan) -> None:
    """Mutants: a few tokens are waited for longer than it takes to make them, though somebody has answered; where
    nobody has, Redis gets no time at all; there is no end; choices that are made at once are waited for one by one."""
    away = SlowJournal(after_s=60.0)
    assert LEAST_WAIT_S <= (await ask(away, nodes, plan, having(5)))[1] < MOST_WAIT_S / 2
    assert (await ask(away, nodes, plan, having(200)))[1] >= MOST_WAIT_S
    three = {index: ReceivedChoice(index, 32) for index in range(3)}
    assert (await ask(away, nodes, await make(n=3), three))[1] < 0.6 * MOST_WAIT_S
    for node in nodes.nodes.values():
        node.made = {}
    assert (await ask(away, nodes, plan, having(5)))[1] < LEAST_WAIT_S


async def test_what_is_not_known_is_made_again(nodes: Fleet, plan: Plan) -> None:
    """Mutant: a resume fails with the journal."""
    for journal in (None, SlowJournal(after_s=60.0), SlowJournal(None), SlowJournal(b"\xff")):
        assert (await ask(journal, nodes, plan, having(5)))[0] == []


async def test_what_needs_nothing_asks_nobody(nodes: Fleet, plan: Plan) -> None:
    """Mutant: every request that names what its client has waits for nodes and Redis."""
    journal = SlowJournal(entry(7))
    for had in (having(0), having(3, 1, 2, 3)):
        assert (await ask(journal, nodes, plan, had))[0] == list(had[0].token_ids)
    assert journal.asked == sum(node.recalls for node in nodes.nodes.values()) == 0


async def test_tokens_go_with_their_log_probabilities(nodes: Fleet) -> None:
    """Nodes keep none. Mutants: nodes are asked all the same; an entry without them is taken."""
    plan = await make(top_logprobs=0)
    nodes.nodes["decode-0"].made = {digest(plan): [1, 2, 3]}
    assert (await ask(SlowJournal(entry(1, 2, logprobs=1)), nodes, plan, having(3)))[0] == []
    assert (await ask(SlowJournal(entry(1, 2, logprobs=2)), nodes, plan, having(3)))[0] == [1, 2]
    assert sum(node.recalls for node in nodes.nodes.values()) == 0


async def test_each_choice_gets_its_own(nodes: Fleet) -> None:
    """Mutant: the answers are taken in the order of all choices, those that need nothing included."""
    plan = await make(n=3)
    nodes.nodes["decode-0"].made = {digest(plan, choice): [choice] * 9 for choice in range(3)}
    had = {0: ReceivedChoice(0, 2, (0, 0)), 1: ReceivedChoice(1, 4), 2: ReceivedChoice(2, 5)}
    calls = NodeCalls()
    found = await Recall(None, lambda *_: [nodes.nodes["decode-0"].record], calls)(plan, had)
    await calls.close()
    assert {index: list(one.token_ids) for index, one in found.items()} == {0: [0] * 2, 1: [1] * 4, 2: [2] * 5}
