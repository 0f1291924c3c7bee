"""Prompt lookup: what it copies, how far, where it stops; bounds, counts, exactness. The rule itself: test_copying."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.copying import MAX_TOKENS
from paceline.spec_decode.drafters.ngram import NgramDrafter
from tests.support.drafting import BUDGETS, CHAIN, TREE, assert_same_text, new_sequence, outcomes, propose
from tests.support.tiny_model import VOCAB, tiny_runner

torch.set_num_threads(1)
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
LONG = DraftBudget(16, 1, TreeKind.CHAIN)


@pytest.fixture(scope="module")
def plain() -> list[Completed]:
    return outcomes(tiny_runner(drafter="none"))


def drafted(tokens: list[int], budget: DraftBudget = CHAIN) -> list[int]:
    return list(propose(NgramDrafter(VOCAB), new_sequence(tokens), budget).token_ids[1:])


def test_the_longer_the_match_the_longer_the_draft() -> None:
    source = [*PHRASE, *range(60, 80), 3]
    lengths = [len(drafted([*source, *PHRASE[:matched]], LONG)) for matched in range(1, 9)]
    assert lengths == sorted(lengths)
    assert lengths[:2] == [4, 8]
    assert drafted([*source, *PHRASE[:8]], LONG) == source[8:24]
    assert drafted([*source, *PHRASE[:8]]) == source[8:14]  # K is the cap
    assert drafted([*source, *PHRASE[:8]], DraftBudget(3)) == source[8:11]


def test_hits_and_misses_are_counted() -> None:
    drafter = NgramDrafter(VOCAB)
    copy, fresh = new_sequence([*PHRASE, 3, *PHRASE[:3]]), new_sequence(PHRASE)
    trees = drafter.propose([copy, fresh, copy], [CHAIN, CHAIN, DraftBudget(0)])
    assert [tree.num_draft_tokens for tree in trees] == [6, 0, 0]
    assert (drafter.hits, drafter.misses) == (1, 1)  # a round without a budget is neither


def test_the_suffix_itself_is_no_match() -> None:
    assert drafted(PHRASE) == []
    assert drafted([5]) == []


def test_the_longest_match_wins_then_the_most_frequent_then_the_newest() -> None:
    """After 2, token 8 is the most frequent; after 1, 2 it is 9."""
    one = DraftBudget(1)
    assert drafted([1, 2, 9, 3, 2, 8, 4, 2, 8, 5, 2, 8, 6, 1, 2], one) == [9]
    assert drafted([3, 2, 8, 4, 2, 8, 5, 2, 9, 6, 2], one) == [8]
    assert drafted([3, 2, 8, 4, 2, 9, 6, 2], one) == [9]


def test_an_undecided_text_is_not_copied() -> None:
    """2 is followed by eight different tokens: each has a 24th."""
    forks = [token for i in range(8) for token in (2, 40 + i)]
    assert drafted([*forks, 2]) == []
    assert drafted([*forks[:6], 2], DraftBudget(1)) == [42]


def test_a_confidence_asked_for_is_kept() -> None:
    tokens = [*PHRASE, 3, *PHRASE[:2]]
    sure = DraftBudget(6, 1, TreeKind.CHAIN, min_confidence=0.6)
    assert drafted(tokens, sure) == []  # after two equal tokens: 2 / 4
    assert drafted([*PHRASE, 3, *PHRASE[:3]], sure) == PHRASE[3:9]


def test_a_tree_holds_what_followed_the_longer_and_the_shorter_match() -> None:
    tokens = [1, 2, 60, 61, 9, 1, 2, 70, 71, 9, 2, 80, 7, 1, 2]
    tree = propose(NgramDrafter(VOCAB), new_sequence(tokens), TREE)
    assert {tree.token_ids[i] for i in range(1, tree.num_nodes) if tree.parents[i] == 0} == {60, 70, 80}
    assert tree.token_ids[1] == 70
    assert not tree.is_chain
    assert propose(NgramDrafter(VOCAB), new_sequence(tokens), DraftBudget(6, 4, TreeKind.CHAIN, 20)).is_chain


def test_of_a_long_context_the_end_is_searched() -> None:
    rng = random.Random(0)
    filler = [100 + rng.randrange(100) for _ in range(MAX_TOKENS)]
    drafter = NgramDrafter(300)
    assert propose(drafter, new_sequence([*PHRASE, *filler, *PHRASE[:4]])).num_draft_tokens == 0
    kept = propose(drafter, new_sequence([*PHRASE, *filler[100:], *PHRASE[:4]]))
    assert list(kept.token_ids[1:]) == PHRASE[4:10]


def test_a_migrated_sequence_drafts_the_same() -> None:
    drafter = NgramDrafter(VOCAB)
    old = new_sequence([*PHRASE, 7, 8, *PHRASE[:3]])
    for token in PHRASE[3:6]:
        propose(drafter, old, TREE)
        old.token_ids.append(token)
    assert propose(drafter, old, TREE) == propose(NgramDrafter(VOCAB), new_sequence(old.token_ids), TREE)


def test_other_sequences_do_not_show() -> None:
    drafter = NgramDrafter(VOCAB)
    done = new_sequence([3, 4], PHRASE)
    propose(drafter, done)
    drafter.finish(done)
    assert propose(drafter, new_sequence([90, *PHRASE[:4]])).num_draft_tokens == 0


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    assert propose(NgramDrafter(10), new_sequence([3, 4, 99, 5, 3, 4])).num_draft_tokens == 0
    with pytest.raises(ValueError, match="vocabulary"):
        NgramDrafter(sys.maxunicode + 1)


@pytest.mark.parametrize("name", BUDGETS)
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    accepted = assert_same_text(NgramDrafter(VOCAB), BUDGETS[name], plain)
    assert (accepted > 0) == (name != "zero")
