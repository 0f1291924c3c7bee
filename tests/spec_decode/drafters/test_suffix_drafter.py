"""Suffix decoding: copies from the request and from the tenant's finished outputs; bounds, tenants, exactness."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.copying import BOUNDARY, text_of
from paceline.spec_decode.drafters.ngram import NgramDrafter
from paceline.spec_decode.drafters.suffix import SuffixDrafter
from tests.support.drafting import BUDGETS, CHAIN, TREE, assert_same_text, new_sequence, outcomes, propose
from tests.support.tiny_model import VOCAB, tiny_runner

torch.set_num_threads(1)
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="module")
def plain() -> list[Completed]:
    return outcomes(tiny_runner(drafter="none"))


def learnt(*outputs: list[int], salt: str = "", drafter: SuffixDrafter | None = None) -> SuffixDrafter:
    """A drafter whose tenant had these answers."""
    drafter = drafter or SuffixDrafter(VOCAB)
    for output in outputs:
        drafter.finish(new_sequence([3, 4], output, salt=salt))
    return drafter


def drafted(drafter: SuffixDrafter, tokens: list[int], budget: DraftBudget = CHAIN, salt: str = "") -> list[int]:
    return list(propose(drafter, new_sequence(tokens, salt=salt), budget).token_ids[1:])


@pytest.mark.parametrize("budget", [CHAIN, TREE])
def test_alone_it_copies_as_ngram_does(budget: DraftBudget) -> None:
    rng = random.Random(0)
    total = 0
    for _ in range(100):
        tokens = [rng.randrange(6) for _ in range(rng.randrange(1, 60))]
        tree = propose(SuffixDrafter(VOCAB), new_sequence(tokens), budget)
        assert tree == propose(NgramDrafter(VOCAB), new_sequence(tokens), budget)
        total += tree.num_draft_tokens
    assert total > 100


def test_finished_outputs_help_the_same_tenant_only() -> None:
    drafter = SuffixDrafter(VOCAB)
    done = new_sequence([3, 4], PHRASE, salt="a")
    propose(drafter, done)
    drafter.finish(done)
    for salt, expected in (("a", PHRASE[4:10]), ("b", []), ("", [])):
        assert drafted(drafter, [90, *PHRASE[:4]], salt=salt) == expected
    assert drafted(drafter, [3], salt="a") == []  # prompts are not learnt
    assert (drafter.hits, drafter.misses) == (1, 4)


def test_a_copy_ends_with_the_text_it_comes_from() -> None:
    drafter = learnt(PHRASE, [30, 31, 32])
    assert drafted(drafter, [90, *PHRASE[:8]]) == PHRASE[8:]
    assert drafted(drafter, [90, PHRASE[-1]]) == []


def test_the_requests_own_text_wins_ties_and_the_longer_match_wins_over_it() -> None:
    one = DraftBudget(1)
    drafter = learnt([1, 2, 80], [1, 2, 80], [5, 1, 2, 90])
    assert drafted(drafter, [1, 2, 60, 9, 1, 2], one) == [60]
    assert drafted(drafter, [1, 2, 60, 5, 1, 2], one) == [90]
    assert drafted(drafter, [2, 60, 9, 1, 2], one) == [80]  # 1, 2 elsewhere, only 2 here
    assert drafted(drafter, [1, 2, 60, 9, 1, 2], DraftBudget(1, 4)) == [60, 80, 90]
    assert drafted(learnt([5, 80, 81]), [9, 5]) == [80, 81]  # even a single token is a match: 1 in 5, then 3 in 7


def test_drafting_stops_where_the_text_is_undecided() -> None:
    """1, 2 is followed by eleven different tokens: each has less than a twentieth."""
    tokens = [token for i in range(11) for token in (1, 2, 100 + i)] + [1, 2]
    assert drafted(SuffixDrafter(VOCAB), tokens) == []
    curious = SuffixDrafter(VOCAB, min_probability=0.01)
    assert drafted(curious, tokens, DraftBudget(1)) == [110]
    assert drafted(curious, tokens, DraftBudget(6, 1, TreeKind.CHAIN, min_confidence=0.5)) == []


def test_finish_learns_once_and_without_a_proposal() -> None:
    drafter = SuffixDrafter(VOCAB)
    seq = new_sequence([3, 4], PHRASE)
    for _ in range(3):
        drafter.finish(seq)
    texts = drafter.outputs.tenants.get("")
    assert texts.text == text_of(PHRASE) + BOUNDARY
    learnt([5], [], drafter=drafter)  # one token teaches nothing
    assert texts.text == text_of(PHRASE) + BOUNDARY
    nothing = learnt(PHRASE, drafter=SuffixDrafter(VOCAB, shared_tokens=0))
    assert len(nothing.outputs.tenants) == 0


def test_bounds_hold_after_many_tokens() -> None:
    rng = random.Random(1)
    drafter = SuffixDrafter(VOCAB, shared_tokens=2000, max_tenants=2)
    for i in range(110):
        output = [rng.randrange(VOCAB) for _ in range(1000)]
        learnt(output, salt=f"tenant-{i % 3}", drafter=drafter)
    assert len(drafter.outputs.tenants) == 2
    assert len(drafter.outputs.tenants.get("tenant-1").text) <= 2000
    assert drafted(drafter, [1, *output[100:110]], salt="tenant-1") == output[110:116]


def test_a_migrated_sequence_drafts_the_same() -> None:
    drafter = learnt([*PHRASE[:5], 60, 61])
    old = new_sequence([*PHRASE, 7, 8, *PHRASE[:3]])
    for token in PHRASE[3:6]:
        propose(drafter, old, TREE)
        old.token_ids.append(token)
    assert propose(drafter, old, TREE) == propose(drafter, new_sequence(old.token_ids), TREE)


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    assert drafted(SuffixDrafter(10), [3, 4, 99, 5, 3, 4]) == []
    with pytest.raises(ValueError, match="vocabulary"):
        SuffixDrafter(sys.maxunicode + 1)


@pytest.mark.parametrize("name", BUDGETS)
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    accepted = assert_same_text(SuffixDrafter(VOCAB), BUDGETS[name], plain)
    assert (accepted > 0) == (name != "zero")


@pytest.mark.parametrize("bad", [{"min_probability": 0.0}, {"shared_tokens": -1}, {"max_tenants": 0}])
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SuffixDrafter(VOCAB, **bad)  # type: ignore[arg-type]
