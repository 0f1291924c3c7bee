"""Lookahead decoding against a slow reference of algorithms.md C10 on a toy model; budgets, end tokens, exactness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from paceline.engine.colocated import Completed
from paceline.spec_decode.accept.verify import walk
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.lookahead import (
    LookaheadDrafter,
    LookaheadState,
    NgramPool,
    lookahead_depth,
    lookahead_nodes,
)
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.drafting import BUDGETS, assert_same_text, new_sequence, outcomes, propose
from tests.support.tiny_model import VOCAB, tiny_runner

torch.set_num_threads(1)
EOS = 2
SHAPES = [(2, 1, 1), (2, 4, 2), (3, 1, 2), (3, 5, 3), (4, 2, 2), (5, 7, 7), (5, 3, 1), (7, 2, 4)]
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
Model = Callable[[list[int]], int]


def toy(tokens: list[int]) -> int:
    """A deterministic "model" that looks three tokens back and falls into cycles; never EOS."""
    padded = [0, 0, *tokens]
    return 3 + (padded[-1] * 7 + padded[-2] * 5 + padded[-3]) % 23


def full_budget(levels: int, window: int, guesses: int) -> DraftBudget:
    nodes = lookahead_nodes(levels, window, guesses) - 1
    return DraftBudget(lookahead_depth(levels, window), 2, TreeKind.STATIC, nodes)


def state_of(seq: Sequence) -> LookaheadState:
    state = seq.memory["lookahead"]
    assert isinstance(state, LookaheadState)
    return state


def argmax_of(model: Model, seq: Sequence, tree: DraftTree) -> list[int]:
    """The model's token after every node, each path run on its own."""
    before = seq.token_ids[:-1]
    return [model(before + [tree.token_ids[i] for i in tree.path(node)]) for node in range(tree.num_nodes)]


def play(drafter: LookaheadDrafter, seq: Sequence, budget: DraftBudget, model: Model = toy) -> list[int]:
    """One round. Returns what it committed."""
    tree = propose(drafter, seq, budget)
    best = argmax_of(model, seq, tree)
    drafter.observe(seq, tree, best)
    committed = walk(tree, best, lambda token: token == EOS, 1000).committed(tree)
    seq.token_ids.extend(committed)
    return committed


@dataclass
class Reference:
    """C10 by the letter: columns hold absolute contexts; one forward per cell."""

    num_levels: int  # N - 1
    guesses: int
    levels: list[list[int | None]]  # level 0 has None for the current token's column
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)  # oldest first

    def context(self, committed: list[int], level: int, column: int) -> list[int]:
        """What a cell sees, itself included."""
        first = [t for t in self.levels[0][1 : column + 1] if t is not None]
        own = [t for upper in self.levels[1 : level + 1] if (t := upper[column]) is not None]
        return [*committed, *first, *own]

    def step(self, committed: list[int]) -> int:
        """Returns the tokens the reference would commit: the best guess's accepted prefix and one more."""
        top = len(self.levels) - 1
        columns = len(self.levels[top])
        result = [toy(self.context(committed, top, c)) for c in range(columns)]
        gained = 1
        if top == self.num_levels - 1:
            for guess in self.pool.get(committed[-1], []):
                right = 0
                while right < len(guess) and toy([*committed, *guess[:right]]) == guess[right]:
                    right += 1
                gained = max(gained, right + 1)
            for c in range(columns - 1, -1, -1):
                key = committed[-1] if c == 0 else self.levels[0][c]
                assert key is not None
                middle = [t for upper in self.levels[1:] if (t := upper[c]) is not None]
                listed = [one for one in self.pool.get(key, []) if one != (*middle, result[c])]
                self.pool[key] = [*listed, (*middle, result[c])][-self.guesses :]
            self.levels = [*self.levels[1:], list(result)]
            self.levels[0] = [None, *self.levels[0][1:]]
        else:
            self.levels = [[None, *self.levels[0][2:]], *(upper[1:] for upper in self.levels[1:]), list(result[1:])]
        return gained


@pytest.mark.parametrize("shape", SHAPES)
def test_window_and_pool_evolve_as_in_the_reference(shape: tuple[int, int, int]) -> None:
    levels, window, guesses = shape
    drafter = LookaheadDrafter(VOCAB, {EOS}, levels, window, guesses, pool_from_text=False)
    seq = new_sequence(PROMPT)
    propose(drafter, seq, full_budget(*shape))
    start = state_of(seq).levels[0]
    assert len(start) == window + levels - 3
    assert set(start) <= set(PROMPT)
    reference = Reference(levels - 1, guesses, [[None, *start]])
    for _ in range(40):
        least = reference.step(seq.token_ids)
        assert len(play(drafter, seq, full_budget(*shape))) >= least  # window nodes can be accepted too
        state = state_of(seq)
        assert [[None, *state.levels[0]], *state.levels[1:]] == reference.levels
        assert {key: state.pool.get(key)[::-1] for key in reference.pool} == reference.pool
        assert len(state.pool) == len(reference.pool)
    assert [len(level) for level in state_of(seq).levels] == [window - 1] + [window] * (levels - 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_cell_stands_where_it_should(shape: tuple[int, int, int]) -> None:
    """Depth is column + level, ancestors are level 0 up to the column and the own column below."""
    levels, window, guesses = shape
    drafter = LookaheadDrafter(VOCAB, {EOS}, *shape)
    seq = new_sequence(PROMPT * 3)
    seen = 0
    for _ in range(12):
        tree = propose(drafter, seq, full_budget(*shape))
        state = state_of(seq)
        assert state.step is not None
        assert len(state.step.cells) == sum(map(len, state.levels)) + 1  # a full budget has room for every cell
        for (level, column), node in state.step.cells.items():
            path = [*state.levels[0][:column], *(state.levels[at][column] for at in range(1, level + 1))]
            assert [tree.token_ids[i] for i in tree.path(node)[1:]] == path
            assert tree.depths[node] == column + level
        assert tree.num_nodes <= lookahead_nodes(levels, window, guesses)
        seen = max(seen, tree.num_nodes)
        play(drafter, seq, full_budget(*shape))
    assert seen > 1 or shape == (2, 1, 1)


def test_text_is_the_models_and_takes_fewer_rounds() -> None:
    def cycling(tokens: list[int]) -> int:
        return 3 + (tokens[-1] * 2 + tokens[-2]) % 11

    drafter = LookaheadDrafter(VOCAB, {EOS})
    seq, rounds = new_sequence(PROMPT), 60
    for _ in range(rounds):
        play(drafter, seq, full_budget(5, 7, 7), cycling)
    plain = list(PROMPT)
    while len(plain) < len(seq.token_ids):
        plain.append(cycling(plain))
    assert seq.token_ids == plain
    assert len(seq.token_ids) - len(PROMPT) > 1.5 * rounds
    assert drafter.hits > 0
    assert drafter.hits + drafter.misses == rounds


def test_the_prompt_fills_the_pool() -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS}, 3, 2, 2)
    seq = new_sequence([5, 6, 7, 5, 6, 8, 5, 6, 9, EOS, 5])
    propose(drafter, seq, full_budget(3, 2, 2))
    pool = state_of(seq).pool
    assert pool.get(5) == [(6, 9), (6, 8)]  # newest first, two at most
    assert pool.get(6) == [(8, 5), (7, 5)]  # 9, EOS is left out
    assert pool.get(EOS) == []


def test_end_tokens_stay_out_of_window_and_pool() -> None:
    def ends(tokens: list[int]) -> int:
        return EOS if sum(tokens[-2:]) % 3 == 0 else toy(tokens)

    drafter = LookaheadDrafter(VOCAB, {EOS}, 4, 5, 3)
    seq = new_sequence([5, EOS, 9, 3, EOS, 44, 5])
    replaced = 0
    for _ in range(40):
        tree = propose(drafter, seq, full_budget(4, 5, 3))
        assert EOS not in tree.token_ids[1:]
        best = argmax_of(ends, seq, tree)
        replaced += best.count(EOS)
        drafter.observe(seq, tree, best)
        seq.token_ids.append(toy(seq.token_ids))
        state = state_of(seq)
        assert all(EOS not in level for level in state.levels)
        assert all(EOS not in found for key in range(VOCAB) for found in state.pool.get(key))
    assert replaced > 0
    hostile = new_sequence([EOS, EOS])  # nothing in the prompt to draw from
    assert EOS not in propose(LookaheadDrafter(VOCAB, {EOS, 0}), hostile, full_budget(5, 7, 7)).token_ids[1:]


def test_random_tokens_follow_the_seed() -> None:
    def start(seed: int) -> list[int]:
        seq = new_sequence(list(range(3, 60)), seed=seed)
        propose(LookaheadDrafter(VOCAB, {EOS}), seq, full_budget(5, 7, 7))
        return state_of(seq).levels[0]

    assert start(1) == start(1)
    assert start(1) != start(2)
    assert len(set(start(1))) > 3


def test_state_is_rebuilt_from_the_tokens() -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS})
    seq = new_sequence(PROMPT)
    for _ in range(10):
        play(drafter, seq, full_budget(5, 7, 7))
    moved = new_sequence(PROMPT, seq.token_ids[len(PROMPT) :])
    drafter.finish(seq)
    drafter.finish(seq)
    assert seq.memory == {}
    budget = full_budget(5, 7, 7)
    assert propose(drafter, seq, budget) == propose(drafter, moved, budget)
    assert len(state_of(moved).pool) == len(state_of(seq).pool) > 0


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 13, 30])
@pytest.mark.parametrize("depth", [1, 2, 4, 9])
def test_narrow_budgets_are_kept_and_the_window_lives_on(nodes: int, depth: int) -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS}, 5, 7, 7)
    seq = new_sequence(PROMPT)
    budget = DraftBudget(depth, 2, TreeKind.STATIC, nodes)
    for _ in range(30):
        propose(drafter, seq, budget)
        state = state_of(seq)
        assert state.step is not None
        top, cells = len(state.levels) - 1, state.step.cells
        assert all((top, column) in cells for _, column in cells if column)  # no column without the node that counts
        play(drafter, seq, budget)
        assert len(state.levels[0]) + 1 == 7 + max(0, 4 - len(state.levels))
        assert all(len(level) == len(state.levels[0]) + 1 for level in state.levels[1:])
    plain = list(PROMPT)
    while len(plain) < len(seq.token_ids):
        plain.append(toy(plain))
    assert seq.token_ids == plain


def test_a_chain_goes_on_as_the_text_did() -> None:
    """Nothing in the prompt repeats; the answer counts to seven over and over."""

    def counting(tokens: list[int]) -> int:
        return 3 + (tokens[-1] - 2) % 7

    drafter, rounds = LookaheadDrafter(VOCAB, {EOS}), 30
    seq = new_sequence([40, 41, 42])
    for _ in range(rounds):
        play(drafter, seq, DraftBudget(4, 1, TreeKind.CHAIN), counting)
    plain = [40, 41, 42]
    while len(plain) < len(seq.token_ids):
        plain.append(counting(plain))
    assert seq.token_ids == plain
    assert len(seq.token_ids) > 3 * rounds


def test_a_chain_budget_gets_the_newest_guess_or_nothing() -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS}, 4, 3, 2)
    seq, chain = new_sequence([5, 6, 7, 8, 5]), DraftBudget(6, 4, TreeKind.CHAIN, 20)
    assert propose(drafter, seq, chain).num_draft_tokens == 0  # level 0 alone has nothing below the root
    for _ in range(2):
        drafter.observe(seq, tree := propose(drafter, seq, chain), argmax_of(toy, seq, tree))
    assert propose(drafter, seq, chain).token_ids == (5, 6, 7, 8)
    seq.token_ids.append(70)
    assert propose(drafter, seq, chain).token_ids == (70,)
    seq.token_ids += [9, 9, 9, 5, 6, 8, 8, 70]
    assert propose(drafter, seq, chain).token_ids == (70, 9, 9, 9)  # what was written since is guessed from, too
    seq.token_ids.append(5)
    assert propose(drafter, seq, chain).token_ids == (5, 6, 8, 8)  # and goes before what is older


def test_without_a_budget_nothing_happens() -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS})
    seq = new_sequence(PROMPT)
    tree = propose(drafter, seq, DraftBudget(0, 4))
    assert (tree.num_nodes, seq.memory) == (1, {})
    drafter.observe(seq, tree, [7])
    assert seq.memory == {}


def test_only_its_own_tree_moves_the_window_and_once() -> None:
    drafter = LookaheadDrafter(VOCAB, {EOS})
    seq = new_sequence(PROMPT)
    tree = propose(drafter, seq, full_budget(5, 7, 7))
    before = state_of(seq).levels
    drafter.observe(seq, DraftTree((PROMPT[-1], 7), (-1, 0), (0, 1)), [7, 7])
    assert state_of(seq).levels == before
    for _ in range(2):
        drafter.observe(seq, tree, argmax_of(toy, seq, tree))
        assert len(state_of(seq).levels) == 2


def test_the_pool_is_bounded_and_forgets_the_oldest() -> None:
    pool = NgramPool(max_tuples=2, max_keys=3)
    for token in (1, 2, 1, 3):
        pool.add(9, (token, token))
    assert pool.get(9) == [(3, 3), (1, 1)]
    for key in range(100_000):
        pool.add(key % 1000, (key,))
    assert len(pool) == 3
    assert (pool.get(999), pool.get(0)) == ([(99_999,)], [])


@pytest.fixture(scope="module")
def plain() -> list[Completed]:
    return outcomes(tiny_runner(drafter="none"))


@pytest.mark.parametrize("name", [*BUDGETS, "full"])
def test_text_is_that_of_plain_decoding(name: str, plain: list[Completed]) -> None:
    budget = (BUDGETS | {"full": full_budget(5, 7, 7)})[name]
    accepted = assert_same_text(LookaheadDrafter(VOCAB, {EOS, 21}), budget, plain)
    assert accepted > 0 or name in ("zero", "one", "one, wide", "chain")  # a chain finds nothing in so short a text


@pytest.mark.parametrize("bad", [{"levels": 1}, {"window": 0}, {"guesses": 0}])
def test_nonsense_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        LookaheadDrafter(VOCAB, {EOS}, **bad)  # type: ignore[arg-type]
