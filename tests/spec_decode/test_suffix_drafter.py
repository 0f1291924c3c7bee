"""Suffix decoding: what it proposes, against a slow count over all occurrences; bounds, tenants, exactness."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.suffix import SuffixDrafter
from paceline.spec_decode.drafters.suffix_index import BOUNDARY, FinishedTexts, SuffixIndex
from support.drafting import BUDGETS, CHAIN, TREE, assert_same_text, new_sequence, outcomes, propose
from support.tiny import VOCAB, tiny_runner

torch.set_num_threads(1)
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="module")
def plain() -> list[Completed]:
    return outcomes(tiny_runner(drafter="none"))


def slow_best(tokens: list[int], factor: float, offset: float, least: float, most: int) -> tuple[list[int], float]:
    """C2b by brute force: for every match length, the chain of most frequent followers over all occurrences.

    Equal counts go to the occurrence with the longest match, then to the newest.
    """

    def matched(end: int) -> int:
        return next(n for n in range(end + 1) if n == end or tokens[end - 1 - n] != tokens[-1 - n])

    best: tuple[list[int], float] = ([], 0.0)
    for length in range(len(tokens) - 1, 0, -1):
        tail = tokens[-length:]
        ends = [e for e in range(length, len(tokens)) if tokens[e - length : e] == tail]
        ends.sort(key=lambda e: (-matched(e), -e))
        chain: list[int] = []
        probability, score = 1.0, 0.0
        while ends and len(chain) < min(math.floor(factor * length + offset), most):
            counts = Counter(tokens[e] for e in ends if e < len(tokens))
            if not counts:
                break
            token, count = counts.most_common(1)[0]
            probability *= count / len(ends)
            if probability < least:
                break
            chain.append(token)
            score += probability
            ends = [e + 1 for e in ends if e < len(tokens) and tokens[e] == token]
        if score > best[1]:
            best = (chain, score)
    return best


def test_scores_are_those_of_counting_every_occurrence() -> None:
    """While no token occurs more often than MAX_OCCURRENCES, the index counts what a full suffix tree would."""
    rng = random.Random(0)
    drafted = 0
    for _ in range(200):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(2, 30))]
        factor, offset = rng.choice([(1.0, 0.0), (2.0, 1.0), (0.5, 2.0)])
        drafter = SuffixDrafter(VOCAB, factor=factor, offset=offset)
        tree = propose(drafter, new_sequence(tokens), CHAIN)
        chain, score = slow_best(tokens, factor, offset, 0.1, CHAIN.num_draft_tokens)
        assert list(tree.token_ids[1:]) == chain
        seq = new_sequence(tokens)
        assert drafter._best(drafter._own_index(seq), seq, CHAIN).score == pytest.approx(score)
        drafted += tree.num_draft_tokens
    assert drafted > 100


def test_a_copy_is_continued_as_far_as_the_match_is_long() -> None:
    drafter = SuffixDrafter(VOCAB)
    for matched in range(1, 5):
        tree = propose(drafter, new_sequence([*PHRASE, 50 + matched, *PHRASE[:matched]]))
        assert list(tree.token_ids[1:]) == PHRASE[matched : 2 * matched]
    assert (drafter.hits, drafter.misses) == (4, 0)
    generous = SuffixDrafter(VOCAB, factor=1.0, offset=3.0)
    assert propose(generous, new_sequence([*PHRASE, 50, *PHRASE[:2]])).num_draft_tokens == 5
    assert propose(generous, new_sequence([*PHRASE, 50, *PHRASE[:2]]), DraftBudget(3)).num_draft_tokens == 3


def test_the_suffix_itself_is_no_match() -> None:
    drafter = SuffixDrafter(VOCAB)
    assert propose(drafter, new_sequence(PHRASE)).num_draft_tokens == 0
    assert propose(drafter, new_sequence([5])).num_draft_tokens == 0
    assert drafter.misses == 2


def test_drafting_stops_where_the_text_is_undecided() -> None:
    """1, 2 is followed by eleven different tokens: each has less than a tenth."""
    forks = [token for i in range(11) for token in (1, 2, 100 + i)]
    tokens = [*forks, 1, 2]
    assert propose(SuffixDrafter(VOCAB), new_sequence(tokens)).num_draft_tokens == 0
    assert propose(SuffixDrafter(VOCAB, min_probability=0.05), new_sequence(tokens)).num_draft_tokens == 2
    confident = DraftBudget(6, 1, TreeKind.CHAIN, min_confidence=0.5)
    assert propose(SuffixDrafter(VOCAB, min_probability=0.05), new_sequence(tokens), confident).num_draft_tokens == 0


def test_a_tree_holds_both_ways_the_text_went() -> None:
    tokens = [1, 2, 3, 60, 61, 8, 1, 2, 3, 70, 71, 9, 1, 2, 3]
    tree = propose(SuffixDrafter(VOCAB, offset=2.0), new_sequence(tokens), TREE)
    assert {tree.token_ids[i] for i in range(1, tree.num_nodes) if tree.parents[i] == 0} == {60, 70}
    assert tree.num_draft_tokens == 5  # floor(1 * 3 + 2)
    narrow = DraftBudget(6, 4, TreeKind.CHAIN, 20)
    assert propose(SuffixDrafter(VOCAB, offset=2.0), new_sequence(tokens), narrow).is_chain

    uneven = [1, 2, 3, 70, 71, 8, 1, 2, 3, 70, 71, 7, *tokens[:6], 9, 1, 2, 3]
    shallow = DraftBudget(1, 4, TreeKind.STATIC, 2)  # what lies deeper takes no room
    assert propose(SuffixDrafter(VOCAB, offset=2.0), new_sequence(uneven), shallow).token_ids == (3, 70, 60)


def test_finished_outputs_help_the_same_tenant_only() -> None:
    drafter = SuffixDrafter(VOCAB)
    done = new_sequence([3, 4], PHRASE, salt="a")
    propose(drafter, done)
    drafter.finish(done)
    expected = PHRASE[4:8]
    for salt, drafted in (("a", expected), ("b", []), ("", [])):
        tree = propose(drafter, new_sequence([90, *PHRASE[:4]], salt=salt))
        assert list(tree.token_ids[1:]) == drafted
    prompt_only = propose(drafter, new_sequence([3], salt="a"))
    assert prompt_only.num_draft_tokens == 0  # prompts are not learnt


def test_finish_learns_once_and_without_a_proposal() -> None:
    drafter = SuffixDrafter(VOCAB)
    seq = new_sequence([3, 4], PHRASE)
    for _ in range(3):
        drafter.finish(seq)
    texts = drafter.tenants.get("")
    assert (len(texts), len(texts.index)) == (1, len(PHRASE) + 1)
    drafter.finish(new_sequence([3, 4], [5]))  # one token teaches nothing
    drafter.finish(new_sequence([3, 4]))
    assert len(texts) == 1
    nothing = SuffixDrafter(VOCAB, shared_tokens=0)
    nothing.finish(new_sequence([3, 4], PHRASE))
    assert len(nothing.tenants) == 0


def test_bounds_hold_after_many_tokens() -> None:
    rng = random.Random(1)
    drafter = SuffixDrafter(VOCAB, shared_tokens=2000, max_tenants=2)
    for i in range(110):
        output = [rng.randrange(VOCAB) for _ in range(1000)]
        drafter.finish(new_sequence([1], output, salt=f"tenant-{i % 3}"))
    assert len(drafter.tenants) == 2
    texts = drafter.tenants.get("tenant-1")  # the last one to finish
    assert len(texts.index) <= 2000
    assert all(len(latest) <= 2000 for latest in texts.index._latest)
    tree = propose(drafter, new_sequence([1, *output[100:110]], salt="tenant-1"))
    assert list(tree.token_ids[1:]) == output[110:116]


def test_texts_leave_oldest_first_and_without_a_trace() -> None:
    texts = FinishedTexts(max_tokens=40, max_depth=64)
    rng = random.Random(2)
    stored: list[list[int]] = []
    for _ in range(200):
        stored.append([rng.randrange(6) for _ in range(rng.randrange(2, 15))])
        texts.add(stored[-1])
        assert len(texts.index) <= 40
        fresh = SuffixIndex(64)
        for tokens in stored[-len(texts) :]:
            fresh.append(tokens)
            fresh.close()
        assert texts.index._tokens == fresh._tokens
        offset = texts.index._offset
        assert [{k: v - offset for k, v in one.items()} for one in texts.index._latest] == list(fresh._latest)
        context = stored[-1][:5]
        assert [(p - offset, n) for p, n in texts.index.occurrences(context)] == fresh.occurrences(context)
    texts.add(list(range(100)))
    assert texts.index._tokens == [*range(61, 100), BOUNDARY]  # of a longer text its end


def test_matches_do_not_cross_from_one_text_to_another() -> None:
    index = SuffixIndex(64)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        index.append(tokens)
        index.close()
    assert index.occurrences([2, 3]) == []  # nothing follows in its text
    assert index.occurrences([0, 2**61 + 3]) == []  # hash(2**61 + 3) == hash(4): a collision is no match
    assert index.occurrences([3, 4]) == [(5, 1)]  # 4, without the 3 of the text before


def test_a_migrated_sequence_drafts_the_same() -> None:
    drafter = SuffixDrafter(VOCAB)
    tokens = [*PHRASE, 7, 8, *PHRASE[:3]]
    old = new_sequence(tokens)
    propose(drafter, old)
    for token in PHRASE[3:6]:
        old.token_ids.append(token)
        propose(drafter, old)
    fresh = new_sequence(old.token_ids)
    assert propose(drafter, old) == propose(drafter, fresh)


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    assert propose(SuffixDrafter(10), new_sequence([3, 4, 99, 5, 3, 4])).num_draft_tokens == 0


@pytest.mark.parametrize("name", BUDGETS)
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    accepted = assert_same_text(SuffixDrafter(VOCAB), BUDGETS[name], plain)
    assert (accepted > 0) == (name != "zero")


@pytest.mark.parametrize("bad", [{"max_depth": 0}, {"min_probability": 0.0}, {"factor": -1.0}, {"max_tenants": 0}])
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        SuffixDrafter(VOCAB, **bad)  # type: ignore[arg-type]
