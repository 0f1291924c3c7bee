"""Lookahead decoding, Jacobi form (Fu et al., arXiv 2402.02057; algorithms.md C10), without weights.

A window of N-1 levels and W columns holds guesses of the future that the target itself refines, one Jacobi step per
round; finished n-grams go to a pool, and those that begin with the last committed token are verified as guesses.
Under a tree mask all of it is one ordinary draft tree: level 0 is a chain below the root, level l of a column hangs
below level l-1 of that column, each guess is a chain below the root, and every node stands where C10 puts it. So
window nodes can be accepted like guesses, and the text stays the target's own.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.request import UINT64_MAX, derive_seed
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

WINDOW_STREAM = 0x3C79AC492BA7B653  # keys the window's filler tokens: independent of the target's noise
MAX_POOL_KEYS = 4096

Levels = list[list[int]]  # level 0: columns 1.. (column 0 is the root); further levels: columns 0..


def lookahead_nodes(levels: int, window: int, guesses: int) -> int:
    """Nodes of a full step, root included: the budget's max_nodes, so one more than its tree_nodes."""
    return (levels - 1) * (window + guesses)


def lookahead_depth(levels: int, window: int) -> int:
    """Depth of a full step: the budget's num_draft_tokens."""
    return max(window + levels - 3, levels - 1)


def advance(levels: Levels, best: list[int], num_levels: int) -> Levels:
    """The window one position further. best: per column, the target's token after its highest level.

    While levels are missing, one is added and a leading column dropped; then the lowest level leaves.
    """
    if len(levels) < num_levels:
        return [*(level[1:] for level in levels), best[1:]]
    above = [*levels[1:], best]
    return [above[0][1:], *above[1:]]


class NgramPool:
    """First token -> the last ``max_tuples`` distinct continuations, for the last ``max_keys`` first tokens."""

    def __init__(self, max_tuples: int, max_keys: int = MAX_POOL_KEYS) -> None:
        self.max_tuples, self.max_keys = max_tuples, max_keys
        self._tuples: dict[int, dict[tuple[int, ...], None]] = {}  # both least recently added first

    def __len__(self) -> int:
        """First tokens kept."""
        return len(self._tuples)

    def add(self, key: int, continuation: tuple[int, ...]) -> None:
        """Enter as the newest."""
        kept = self._tuples.pop(key, {})
        kept.pop(continuation, None)
        kept[continuation] = None
        if len(kept) > self.max_tuples:
            del kept[next(iter(kept))]
        self._tuples[key] = kept
        if len(self._tuples) > self.max_keys:
            del self._tuples[next(iter(self._tuples))]

    def get(self, key: int) -> list[tuple[int, ...]]:
        """Continuations, newest first."""
        return list(self._tuples.get(key, {}))[::-1]


@dataclass(frozen=True)
class Step:
    """A proposed tree and where the window stands in it."""

    tree: DraftTree
    position: int  # of the root
    cells: dict[tuple[int, int], int]  # (level, column) -> node; cells without room are missing


@dataclass
class LookaheadState:
    """Window and pool of one sequence; rebuilt from its tokens when absent, as after a migration."""

    levels: Levels
    pool: NgramPool
    fillers: list[int]  # what random window tokens are drawn from
    seed: int
    num_learnt: int  # tokens of the sequence whose n-grams are in the pool, or are not wanted there
    step: Step | None = None  # proposed and not yet observed

    def filler(self, position: int) -> int:
        """A random token, a function of request seed and position."""
        return self.fillers[derive_seed(self.seed, position + 1) % len(self.fillers)]


@dataclass
class StepPairs:
    """The (parent, token) pairs for build_tree, and which pair each window cell is."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    cells: dict[tuple[int, int], int] = field(default_factory=lambda: {(0, 0): -1})

    def add_chain(self, token_ids: Seq[int]) -> None:
        """A chain below the root."""
        parent = -1
        for token_id in token_ids:
            self.pairs.append((parent, token_id))
            parent = len(self.pairs) - 1

    def add_column(self, levels: Levels, column: int) -> None:
        """One column of the window; columns come from left to right."""
        for level, tokens in enumerate(levels):
            if level or column:
                parent = self.cells[(level - 1, column) if level else (0, column - 1)]
                self.pairs.append((parent, tokens[column if level else column - 1]))
                self.cells[level, column] = len(self.pairs) - 1

    def nodes(self, tree: DraftTree) -> dict[tuple[int, int], int]:
        """The tree's node of each cell: build_tree merges cells and guesses that share a path."""
        child = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))}
        at: dict[int, int | None] = {-1: 0}
        for i, (parent, token_id) in enumerate(self.pairs):
            above = at[parent]
            at[i] = None if above is None else child.get((above, token_id))
        return {cell: node for cell, pair in self.cells.items() if (node := at[pair]) is not None}


class LookaheadDrafter(Drafter):
    """Jacobi windows and n-gram guesses.

    A chain budget gets the newest guess, or nothing: a column of the window that few rounds refined is seldom right.
    The window needs a budget of kind STATIC, width above 1, num_draft_tokens = lookahead_depth(levels, window) and
    tree_nodes = lookahead_nodes(levels, window, guesses) - 1. With less, the rightmost columns and the oldest guesses
    stay out; window cells that were not verified are filled with random prompt tokens.

    levels: N, length of an n-gram (its first token counted), at least 2. window: W columns. guesses: G n-grams kept
    per first token and verified at most. eos_token_ids are kept out of window and pool. pool_from_text: fill the
    pool with the n-grams of prompt and committed output, too.
    """

    name = "lookahead"
    needs_argmax = True

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int],
        levels: int = 5,
        window: int = 7,
        guesses: int = 7,
        pool_from_text: bool = True,
    ) -> None:
        if levels < 2 or window < 1 or guesses < 1:
            raise ValueError("levels must be at least 2, window and guesses at least 1")
        self.vocab_size, self.eos = vocab_size, frozenset(eos_token_ids)
        self.levels, self.window, self.guesses = levels, window, guesses
        self.pool_from_text = pool_from_text
        self.hits = 0  # rounds with at least one guess
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        root = seq.token_ids[-1]
        if budget.num_draft_tokens == 0:
            return DraftTree((root,), (-1,), (0,))
        state = self._state(seq)
        self._learn_text(state, seq.token_ids)
        full = len(state.levels) == self.levels - 1
        guesses = state.pool.get(root) if full else []
        self.hits += bool(guesses)
        self.misses += not guesses
        plan = self._plan(state.levels, guesses, budget)
        tree = build_tree(root, plan.pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)
        state.step = Step(tree, len(seq.token_ids) - 1, plan.nodes(tree))
        return tree

    def _plan(self, levels: Levels, guesses: list[tuple[int, ...]], budget: DraftBudget) -> StepPairs:
        """Guesses may take half of a narrow budget, at least one; the window comes next, further guesses last."""
        plan, room, length = StepPairs(), budget.max_nodes - 1, self.levels - 1
        if budget.tree is TreeKind.CHAIN or budget.tree_width == 1:
            if guesses:
                plan.add_chain(guesses[0])
            return plan
        sure = min(len(guesses), max(1, room // 2 // length))
        for guess in guesses[:sure]:
            plan.add_chain(guess)
        for column in range(len(levels[0]) + 1):
            nodes = len(levels) if column else len(levels) - 1
            if len(plan.pairs) + nodes > room or column + len(levels) - 1 > budget.num_draft_tokens:
                break
            plan.add_column(levels, column)
        for guess in guesses[sure:]:
            plan.add_chain(guess)
        return plan

    def _state(self, seq: Sequence) -> LookaheadState:
        state = seq.memory.get(self.name)
        if state is None:
            state = seq.memory[self.name] = self._start(seq)
        assert isinstance(state, LookaheadState)
        return state

    def _start(self, seq: Sequence) -> LookaheadState:
        tokens = seq.token_ids
        end = seq.request.prompt_token_ids[-MAX_POOL_KEYS:]
        prompt = [t for t in end if t not in self.eos and 0 <= t < self.vocab_size]
        anything = next((t for t in range(self.vocab_size) if t not in self.eos), 0)
        seed = ((seq.request.params.seed or 0) ^ WINDOW_STREAM) & UINT64_MAX
        learnt = max(0, len(tokens) - MAX_POOL_KEYS)
        state = LookaheadState([[]], NgramPool(self.guesses), prompt or [anything], seed, learnt)
        after = range(len(tokens), len(tokens) + self.window + self.levels - 3)
        state.levels[0] = [state.filler(position) for position in after]
        return state

    def _learn_text(self, state: LookaheadState, tokens: Seq[int]) -> None:
        """Enter the n-grams that the text has had since the last round: what followed a token is the newest guess."""
        end = len(tokens) - self.levels + 1
        for i in range(state.num_learnt, end if self.pool_from_text else 0):
            self._learn(state.pool, tokens[i], tuple(tokens[i + 1 : i + self.levels]))
        state.num_learnt = max(state.num_learnt, end)

    def _learn(self, pool: NgramPool, key: int, continuation: tuple[int, ...]) -> None:
        if self.eos.isdisjoint(continuation):  # the walk never goes past an end-of-sequence token
            pool.add(key, continuation)

    def observe(self, seq: Sequence, tree: DraftTree, argmax: Seq[int]) -> None:
        """One Jacobi step: the window moves by one position, finished n-grams enter the pool (column 0's newest)."""
        state = seq.memory.get(self.name)
        if not isinstance(state, LookaheadState) or state.step is None or state.step.tree != tree:
            return
        step, state.step = state.step, None
        top, best = len(state.levels) - 1, []
        for column in range(len(state.levels[0]) + 1):
            node = step.cells.get((top, column))
            if node is None or argmax[node] in self.eos:
                best.append(state.filler(step.position + column + top + 1))
                continue
            best.append(argmax[node])
        if top == self.levels - 2:
            for column in reversed(range(len(best))):
                node = step.cells.get((top, column))
                if node is not None:
                    key = state.levels[0][column - 1] if column else tree.token_ids[0]
                    middle = [level[column] for level in state.levels[1:]]
                    self._learn(state.pool, key, (*middle, argmax[node]))
        state.levels = advance(state.levels, best, self.levels - 1)

    def finish(self, seq: Sequence) -> None:
        """Forget window and pool."""
        seq.memory.pop(self.name, None)


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    return plan_weightless(LookaheadDrafter(model.spec.vocab_size, model.spec.eos_token_ids))
