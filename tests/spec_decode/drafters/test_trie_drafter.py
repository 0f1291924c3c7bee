"""Trie lookahead: retrieval, ranking and quotas, bounds, tenants, exactness."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.copying import BOUNDARY, MAX_TOKENS, text_of
from paceline.spec_decode.drafters.trie import TrieDrafter
from tests.support.drafting import BUDGETS, CHAIN, TREE, assert_same_text, new_sequence, outcomes, propose
from tests.support.tiny_model import VOCAB, tiny_runner

torch.set_num_threads(1)
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]


@pytest.fixture(scope="module")
def plain() -> list[Completed]:
    return outcomes(tiny_runner(drafter="none"))


def first_level(tree_tokens: tuple[int, ...], parents: tuple[int, ...]) -> list[int]:
    return [token for token, parent in zip(tree_tokens, parents, strict=True) if parent == 0]


@pytest.mark.parametrize("budget", [CHAIN, TREE])
def test_a_copy_is_continued(budget: DraftBudget) -> None:
    drafter = TrieDrafter(VOCAB)
    for matched in (1, 3, 9):
        tree = propose(drafter, new_sequence([*PHRASE, 50, *PHRASE[:matched]]), budget)
        assert list(tree.token_ids[1:]) == [*PHRASE[matched:], 50, *PHRASE][: tree.num_draft_tokens]
        assert tree.num_draft_tokens == min(6, 11 - matched + matched)
    assert (drafter.hits, drafter.misses) == (3, 0)


def test_the_suffix_itself_is_no_match() -> None:
    drafter = TrieDrafter(VOCAB)
    assert propose(drafter, new_sequence(PHRASE)).num_draft_tokens == 0
    assert propose(drafter, new_sequence([5])).num_draft_tokens == 0
    assert drafter.misses == 2


def test_the_longest_suffix_goes_first() -> None:
    """After 2, token 8 is the most frequent; after 1, 2 it is 9."""
    tokens = [1, 2, 9, 3, 2, 8, 4, 2, 8, 5, 2, 8, 6, 1, 2]
    assert propose(TrieDrafter(VOCAB), new_sequence(tokens), DraftBudget(1)).token_ids == (2, 9)
    wide = propose(TrieDrafter(VOCAB), new_sequence(tokens), DraftBudget(1, 2))
    assert wide.token_ids == (2, 9, 8)  # the shorter suffix fills what is left


def test_a_tree_holds_both_ways_the_text_went_and_no_node_twice() -> None:
    tokens = [1, 2, 3, 60, 61, 9, 1, 2, 3, 70, 71, 9, 1, 2, 3]
    tree = propose(TrieDrafter(VOCAB), new_sequence(tokens), TREE)
    assert sorted(first_level(tree.token_ids, tree.parents)) == [60, 70]
    assert tree.num_nodes <= TREE.max_nodes


def slow_chain(prompt: list[int], output: list[int], others: list[list[int]], weight: float, most: int) -> list[int]:
    """C11's single branch by counting whole texts: what follows the longest suffix, then what shorter ones add."""
    context, chain = prompt + output, list[int]()
    texts = [(context, len(prompt)), *((text, 0) for text in others)]  # (tokens, where its output begins)
    for length in range(min(8, len(context)), 0, -1):
        while len(chain) < most:
            path = context[-length:] + chain
            scores: Counter[int] = Counter()
            for tokens, boundary in texts:
                for end in range(len(path), len(tokens)):
                    if tokens[end - len(path) : end] == path:
                        # A place is the prompt's when the token after the suffix is.
                        from_prompt = end - len(chain) < boundary
                        scores[tokens[end]] += round(10_000 * (1 - weight if from_prompt else weight))
            if not scores:
                break
            best = max(scores.values())
            tied = [token for token, score in scores.items() if score == best]
            if len(tied) > 1:
                return chain  # which of them is a matter of order, not of counts
            chain.append(tied[0])
    return chain


def test_single_branches_are_those_of_counting_every_place() -> None:
    rng = random.Random(0)
    compared = 0
    for _ in range(300):
        prompt, output, *others = ([rng.randrange(5) for _ in range(rng.randrange(2, 25))] for _ in range(4))
        weight = rng.choice((0.1, 0.5, 0.9))
        drafter = TrieDrafter(VOCAB, output_weight=weight)
        for text in others:
            drafter.finish(new_sequence([60], text))
        expected = slow_chain(prompt, output, others, weight, 6)
        tree = propose(drafter, new_sequence(prompt, output))
        assert list(tree.token_ids[1 : 1 + len(expected)]) == expected
        compared += len(expected)
    assert compared > 500


def test_finish_is_idempotent_and_forgets_the_prompt() -> None:
    drafter = TrieDrafter(VOCAB)
    seq = new_sequence([*PHRASE, 3], [5, 6, 7])
    propose(drafter, seq)
    for _ in range(3):
        drafter.finish(seq)
    assert drafter.outputs.text(seq) == text_of([5, 6, 7]) + BOUNDARY
    assert propose(drafter, new_sequence([90, *PHRASE[:3]])).num_draft_tokens == 0
    drafter.finish(new_sequence([3, 4], [5, 6]))  # never drafted for
    assert drafter.outputs.text(seq) == text_of([5, 6, 7]) + BOUNDARY + text_of([5, 6]) + BOUNDARY


def test_finished_outputs_help_the_same_tenant_only() -> None:
    drafter = TrieDrafter(VOCAB)
    drafter.finish(new_sequence([3, 4], PHRASE, salt="a"))
    for salt, drafted in (("a", PHRASE[4:]), ("b", []), ("", [])):
        for budget in (CHAIN, TREE):
            tree = propose(drafter, new_sequence([90, *PHRASE[:4]], salt=salt), budget)
            assert list(tree.token_ids[1:]) == drafted


def test_ranking_and_quotas() -> None:
    """The prompt's count leads by weight; the outputs' quota still gets its nodes."""
    prompt = [token for i in range(8) for token in (1, 30 + i)]
    outputs = [token for i in range(8) for token in (1, 60 + i)]

    def drafted(**options: float) -> list[int]:
        drafter = TrieDrafter(VOCAB, **options)  # type: ignore[arg-type]
        for _ in range(3):
            drafter.finish(new_sequence([5], outputs))
        tree = propose(drafter, new_sequence([*prompt, 1]), DraftBudget(1, 8))
        return sorted(tree.token_ids[1:])

    assert [token < 60 for token in drafted(min_prompt_share=0.0, min_output_share=0.0)] == [True] * 8
    assert [token < 60 for token in drafted(output_weight=1.0, min_prompt_share=0.0)] == [False] * 8
    shared = drafted()
    assert sum(token >= 60 for token in shared) == 2  # a quarter
    assert sum(token >= 60 for token in drafted(output_weight=1.0)) == 6


def test_bounds_hold_after_many_tokens() -> None:
    rng = random.Random(1)
    drafter = TrieDrafter(VOCAB, shared_tokens=3000, max_tenants=2)
    for i in range(34):
        output = [rng.randrange(VOCAB) for _ in range(2000)]
        drafter.finish(new_sequence([1], output, salt=f"tenant-{i % 3}"))
    assert len(drafter.outputs.tenants) == 2
    tail = new_sequence(output[-200:-9], salt="tenant-0")
    assert 0 < len(drafter.outputs.text(tail)) <= 3000
    assert list(propose(drafter, tail).token_ids[1:]) == output[-9:-3]


def test_of_a_long_context_the_end_is_searched_and_is_still_the_prompts() -> None:
    prompt = [*PHRASE, *(100 + i % 50 for i in range(MAX_TOKENS)), 3, 60]
    drafter = TrieDrafter(200)
    assert propose(drafter, new_sequence([*prompt, *PHRASE[:4]])).num_draft_tokens == 0
    twice_in_the_output = [3, 70, 9, 3, 70, 8, 3]
    assert propose(drafter, new_sequence(prompt, twice_in_the_output), DraftBudget(1)).token_ids == (3, 60)


def test_a_migrated_sequence_drafts_the_same() -> None:
    tokens = [*PHRASE, 7, 8, *PHRASE[:3]]
    moved = new_sequence(tokens, PHRASE[3:6])
    stayed, drafter = new_sequence(tokens), TrieDrafter(VOCAB)
    for token in PHRASE[3:6]:
        propose(drafter, stayed, TREE)
        stayed.token_ids.append(token)
    assert propose(drafter, stayed, TREE) == propose(TrieDrafter(VOCAB), moved, TREE)


def test_tokens_outside_the_vocabulary_are_not_drafted() -> None:
    assert propose(TrieDrafter(10), new_sequence([3, 4, 99, 5, 3, 4]), TREE).num_draft_tokens == 0
    with pytest.raises(ValueError, match="vocabulary"):
        TrieDrafter(sys.maxunicode + 1)


@pytest.mark.parametrize("name", BUDGETS)
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    accepted = assert_same_text(TrieDrafter(VOCAB), BUDGETS[name], plain)
    assert (accepted > 0) == (name != "zero")


def test_a_width_of_one_is_a_single_branch() -> None:
    tokens = [1, 2, 3, 60, 61, 9, 1, 2, 3, 70, 71, 9, 1, 2, 3]
    for budget in (DraftBudget(6, 1), DraftBudget(6, 4, TreeKind.CHAIN, 20)):
        assert propose(TrieDrafter(VOCAB), new_sequence(tokens), budget).token_ids[1:] == (70, 71, 9, 1, 2, 3)


@pytest.mark.parametrize(
    "bad", [{"shared_tokens": -1}, {"output_weight": 2.0}, {"min_prompt_share": 0.9}, {"min_output_share": -0.1}]
)
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|shares"):
        TrieDrafter(VOCAB, **bad)  # type: ignore[arg-type]
