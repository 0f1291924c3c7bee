"""Trie lookahead: retrieval, ranking and quotas, bounds, tenants, exactness."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.trie import ROOTS_PER_ROUND, Forest, TrieDrafter, TrieNode, TrieState
from support.drafting import BUDGETS, CHAIN, TREE, assert_same_text, new_sequence, outcomes, propose
from support.tiny import VOCAB, tiny_runner

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


def test_outputs_are_learnt_branch_by_branch() -> None:
    """A running sequence's output is learnt where branch_length tokens follow, the rest at finish."""
    drafter = TrieDrafter(VOCAB, branch_length=4)
    seq = new_sequence([3, 4])
    for count, token in enumerate(PHRASE, start=1):
        seq.token_ids.append(token)
        propose(drafter, seq)
        outputs = drafter.tenants.find("")
        learnt = [root for root in [4, *PHRASE] if outputs is not None and outputs.find([root]) is not None]
        assert learnt == [4, *PHRASE][: max(0, count - 3)]
    drafter.finish(seq)
    outputs = drafter.tenants.get("")
    assert outputs.find(PHRASE[-2:]) is not None
    node = outputs.find([4, *PHRASE[:4]])
    assert node is not None
    assert (node.count, node.children) == (1.0, {})
    assert outputs.find([3]) is None  # the prompt is not learnt


def test_finish_is_idempotent_and_forgets_the_prompt() -> None:
    drafter = TrieDrafter(VOCAB)
    seq = new_sequence([*PHRASE, 3], [5, 6, 7])
    propose(drafter, seq)
    for _ in range(3):
        drafter.finish(seq)
    root = drafter.tenants.get("").find([5])
    assert root is not None
    assert root.count == 1.0
    assert propose(drafter, new_sequence([90, *PHRASE[:3]])).num_draft_tokens == 0
    never_drafted = new_sequence([3, 4], [5, 6])
    drafter.finish(never_drafted)
    drafter.finish(never_drafted)
    assert root.count == 2.0


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
        drafter = TrieDrafter(VOCAB, branch_length=1, **options)  # type: ignore[arg-type]
        for _ in range(3):
            drafter.finish(new_sequence([5], outputs))
        tree = propose(drafter, new_sequence([*prompt, 1]), DraftBudget(1, 8))
        return sorted(tree.token_ids[1:])

    assert [token < 60 for token in drafted(min_prompt_share=0.0, min_output_share=0.0)] == [True] * 8
    assert [token < 60 for token in drafted(output_weight=1.0, min_prompt_share=0.0)] == [False] * 8
    shared = drafted()
    assert sum(token >= 60 for token in shared) == 2  # a quarter
    assert sum(token >= 60 for token in drafted(output_weight=1.0)) == 6


def test_the_forest_halves_its_counts_when_full() -> None:
    forest = Forest(max_nodes=10)
    for _ in range(4):
        forest.insert([1, 2, 3])
    for token in range(10, 17):
        forest.insert([token])
    assert forest.num_nodes == 10
    forest.insert([99])
    assert forest.num_nodes == 3
    node = forest.find([1, 2, 3])
    assert node is not None
    assert node.count == 2.0
    assert forest.find([99]) is None


def test_bounds_hold_after_many_tokens() -> None:
    rng = random.Random(1)
    drafter = TrieDrafter(VOCAB, max_nodes=3000, max_tenants=2)
    for i in range(34):
        output = [rng.randrange(VOCAB) for _ in range(3000)]
        drafter.finish(new_sequence([1], output, salt=f"tenant-{i % 3}"))
    assert len(drafter.tenants) == 2
    forest = drafter.tenants.get("tenant-0")
    assert 0 < forest.num_nodes <= 3000
    assert forest.num_nodes == len(nodes(forest))
    assert list(propose(drafter, new_sequence(output[-200:-9], salt="tenant-0")).token_ids[1:]) == output[-9:-3]
    long = new_sequence([*PHRASE, *(100 + i % 90 for i in range(3000))], PHRASE[:4], salt="elsewhere")
    assert propose(drafter, long).num_draft_tokens == 0  # of a long prompt only the end is kept
    long.scratch.clear()
    assert propose(TrieDrafter(VOCAB), long).token_ids[1:] == tuple(PHRASE[4:10])


def test_a_long_prompt_is_inserted_over_several_rounds() -> None:
    """All of it in the end, each root once, and never more in one round than the bound."""
    prompt = [*(200 + i % 40 for i in range(2 * ROOTS_PER_ROUND)), *PHRASE, 3]
    drafter = TrieDrafter(300)
    seq = new_sequence(prompt, PHRASE[:4])
    drafted = [list(propose(drafter, seq).token_ids[1:]) for _ in range(4)]
    assert drafted == [[], [], [*PHRASE[4:], 3][:6], [*PHRASE[4:], 3][:6]]
    state = seq.scratch["trie"]
    assert isinstance(state, TrieState)
    assert sum(child.count for child in state.prompt._root.children.values()) == len(prompt) - 1


def nodes(forest: Forest) -> list[TrieNode]:
    found: list[TrieNode] = []
    todo = [forest._root]
    while todo:
        node = todo.pop()
        found.extend(node.children.values())
        todo.extend(node.children.values())
        assert all(child.count <= node.count or node is forest._root for child in node.children.values())
    return found


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


@pytest.mark.parametrize("name", BUDGETS)
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    accepted = assert_same_text(TrieDrafter(VOCAB), BUDGETS[name], plain)
    assert (accepted > 0) == (name != "zero")


def test_a_width_of_one_is_a_single_branch() -> None:
    tokens = [1, 2, 3, 60, 61, 9, 1, 2, 3, 70, 71, 9, 1, 2, 3]
    for budget in (DraftBudget(6, 1), DraftBudget(6, 4, TreeKind.CHAIN, 20)):
        assert propose(TrieDrafter(VOCAB), new_sequence(tokens), budget).token_ids[1:] == (70, 71, 9, 1, 2, 3)


@pytest.mark.parametrize(
    "bad", [{"branch_length": 0}, {"output_weight": 2.0}, {"min_prompt_share": 0.9}, {"min_output_share": -0.1}]
)
def test_nonsense_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|shares"):
        TrieDrafter(VOCAB, **bad)  # type: ignore[arg-type]
