"""When the tokens that a client was told are written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from cluster.contract.generation import GenerationRequest, ReceivedChoice
from cluster.contract.plan import Plan, ServedModel, make_plan
from cluster.routing import told
from cluster.routing.told import FEW_TOKENS, OFTEN_S, ToldTokens
from cluster.state.journal import Journal
from cluster.state.sealing import Seal
from paceline.config import ServeConfig
from paceline.results import Chunk
from paceline.v1 import inference_pb2
from tests.support.byte_text import VOCAB, ByteTokenizer
from tests.support.scripted_nodes import MAX_MODEL_LEN

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
async def journal() -> AsyncIterator[Journal]:
    """Its table alone: no Redis is there."""
    made = Journal(NOWHERE, Seal("11" * 32), ttl_s=60.0, entry_bytes=10_000, total_bytes=100_000)
    yield made
    await made.close()


@pytest.fixture
async def plan() -> Plan:
    served = ServedModel("tiny", MAX_MODEL_LEN, VOCAB, (), ServeConfig(model="tiny"))
    return await make_plan(GenerationRequest("hello", max_tokens=100), served, ByteTokenizer(), None)


def written(journal: Journal) -> list[int]:
    """The tokens in the entry; none where there is no entry."""
    found = [inference_pb2.GenerateResponse.FromString(kept.entry) for kept in journal._held.values()]
    return [token_id for one in found for token_id in one.choices[0].token_ids]


def tokens(first: int, count: int) -> Chunk:
    return Chunk(0, first, tuple(range(first, first + count)))


async def test_a_few_tokens_or_a_second_are_enough(
    journal: Journal, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: every chunk is written; a slow stream is written after many tokens alone; the end is not."""
    now = [100.0]
    monkeypatch.setattr(told, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = ToldTokens(journal, plan, {})
    stream.note(tokens(0, FEW_TOKENS - 1))
    assert written(journal) == []
    stream.note(tokens(FEW_TOKENS - 1, 1))
    stream.note(tokens(FEW_TOKENS, 1))
    assert written(journal) == list(range(FEW_TOKENS))
    now[0] += OFTEN_S
    stream.note(tokens(FEW_TOKENS + 1, 1))
    assert written(journal) == list(range(FEW_TOKENS + 2))
    stream.note(tokens(FEW_TOKENS + 2, 1))
    stream.end(complete=False)
    assert written(journal) == list(range(FEW_TOKENS + 3))


async def test_what_the_journal_has_given_up_is_packed_no_more(journal: Journal, plan: Plan) -> None:
    """Mutant: a stream whose entry was evicted packs all of its tokens again and again."""
    stream = ToldTokens(journal, plan, {})
    stream.note(tokens(0, FEW_TOKENS))
    for kept in list(journal._held.values()):
        journal._evict(kept.key, "full")
    stream.note(tokens(FEW_TOKENS, FEW_TOKENS))
    stream.note(tokens(2 * FEW_TOKENS, 1000))
    stream.end(complete=True)
    assert not journal._held
    assert stream._message.ByteSize() == 0


async def test_told_tokens_give_way_before_requests(journal: Journal, plan: Plan) -> None:
    """They can be made again. Mutant: streams that tell much cost others their requests."""
    requests = [journal.keep(f"request-{number}", b"x" * 9_000) for number in range(9)]
    ToldTokens(journal, plan, {}).note(tokens(0, 4_000))
    assert len(journal._held) == 10
    requests.append(journal.keep("late", b"x" * 9_000))
    assert all(kept is not None and journal.holds(kept) for kept in requests)


async def test_an_entry_that_may_be_fuller_is_left_alone(journal: Journal, plan: Plan) -> None:
    """The router that goes on knew 10 of 50 tokens, and Redis may have more of them by now. Mutant: it writes at
    once."""
    stream = ToldTokens(journal, plan, {0: ReceivedChoice(0, 50, tuple(range(10)))})
    stream.note(tokens(0, 40))
    assert written(journal) == []
    stream.note(tokens(40, 11))
    assert written(journal) == list(range(51))


async def test_streams_of_one_plan_share_what_the_longest_was_told(journal: Journal, plan: Plan) -> None:
    """The same body and seed, asked twice at once. Mutants: the later stream takes the entry over, with less, and the
    first gives up; the end of one ends what the other needs; the shorter one counts."""
    first, second = ToldTokens(journal, plan, {}), ToldTokens(journal, plan, {})
    first.note(tokens(0, 4 * FEW_TOKENS))
    second.note(tokens(0, FEW_TOKENS))
    assert written(journal) == list(range(4 * FEW_TOKENS))
    first.note(tokens(4 * FEW_TOKENS, FEW_TOKENS))
    assert written(journal) == list(range(5 * FEW_TOKENS))
    first.end(complete=True)
    (kept,) = journal._held.values()
    assert (kept.live, len(kept.entry) > 0) == (True, True)
    second.note(tokens(FEW_TOKENS, FEW_TOKENS))
    assert written(journal) == list(range(5 * FEW_TOKENS))
    second.end(complete=False)
    assert not kept.live
