"""Draft lengths in simulated worlds with an explicit cost model: no clock, no model.

The optimum of every world is found by brute force (algorithms.md I1, B9).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import FinishReason
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.length.adaptive import (
    FixedLength,
    GoodputLength,
    LengthPolicy,
    SharedView,
    WindowLength,
    limited,
    make_policy,
    nodes_per_depth,
)
from paceline.spec_decode.length.cost import CostTable
from paceline.spec_decode.length.goodput import Ladder, allocate, depth_limits
from paceline.spec_decode.length.rates import reach
from paceline.spec_decode.sequence import Sequence
from tests.support.simulated_rounds import Costs, accept, bare_sequence, budget_tree, chain_tree, commit

Step = Callable[[int, int], float]  # (batch, rows) -> seconds
Rate = Callable[[int, int], float]  # (sequence, depth from 0) -> acceptance given the depth before


class Loop:
    """Rounds of a fixed batch under a policy."""

    def __init__(self, policy: LengthPolicy, costs: Costs, batch: int, cap: DraftBudget, seed: int = 1) -> None:
        self.policy, self.costs, self.cap = policy, costs, cap
        self.seqs = [bare_sequence(i) for i in range(batch)]
        self.rng = random.Random(seed)
        self.tokens, self.seconds = 0, 0.0
        self.last: list[DraftBudget] = []  # of the round in progress

    def round(self, rate: Rate) -> list[DraftBudget]:
        budgets = self.last = self.policy.decide(self.seqs, [self.cap] * len(self.seqs))
        trees = [budget_tree(seq, budget, "mtp") for seq, budget in zip(self.seqs, budgets, strict=True)]
        found = []
        for i, (seq, tree) in enumerate(zip(self.seqs, trees, strict=True)):
            found.append(accept(self.rng, tree, [rate(i, d) for d in range(64)]))
            commit(seq, tree, found[-1])
        draft_s, verify_s = self.costs.draft_s(trees), self.costs.verify_s(trees)
        self.policy.observe(self.seqs, trees, found, draft_s, verify_s)
        self.tokens += sum(found) + len(found)
        self.seconds += draft_s + verify_s
        return budgets

    def run(self, rounds: int, rate: Rate) -> list[list[int]]:
        """Depths per round; counters afterwards are of these rounds alone."""
        self.tokens, self.seconds = 0, 0.0
        return [[b.num_draft_tokens for b in self.round(rate)] for _ in range(rounds)]


def goodput(costs: Costs, rate: float, depth: int, batch: int = 1) -> float:
    """Expected tokens per second when every sequence drafts a chain of ``depth``."""
    tokens = batch * (1 + sum(reach([rate] * depth)))
    return tokens / (costs.step(batch, batch * (1 + depth)) + depth * costs.draft["mtp"])


def best_depth(costs: Costs, rate: float, batch: int = 1, deepest: int = 16) -> int:
    return max(range(deepest + 1), key=lambda depth: goodput(costs, rate, depth, batch))


def flat(batch: int, rows: int) -> float:
    return 1.0


def sloped(batch: int, rows: int) -> float:
    return 1.0 + 0.035 * (rows - 1)


def ridge(batch: int, rows: int) -> float:
    return max(1.0, rows / 64)


WORLDS = [  # (acceptance, draft step in plain steps, step, batch)
    (0.8, 0.05, flat, 1),
    (0.6, 0.05, flat, 1),
    (0.9, 0.1, flat, 1),
    (0.7, 0.03, sloped, 1),
    (0.4, 0.02, sloped, 1),
    (0.8, 0.05, ridge, 8),
    (0.7, 0.02, ridge, 32),
    (0.05, 0.2, sloped, 1),
]


@pytest.mark.parametrize(
    ("rate", "share", "depth", "speedup"), [(0.8, 0.05, 8, 3.09), (0.6, 0.05, 4, 1.92), (0.9, 0.1, 10, 3.43)]
)
def test_the_worked_numbers(rate: float, share: float, depth: int, speedup: float) -> None:
    """I1: the optimum and its speed-up, by the allocation itself."""
    depths, got = allocate([Ladder(reach([rate] * 16))], lambda rows: 1.0, lambda d: d * share)
    assert depths == [depth]
    assert got == pytest.approx(speedup, abs=0.005)


@pytest.mark.parametrize(("rate", "share", "step", "batch"), WORLDS)
def test_goodput_finds_the_best_length(
    rate: float, share: float, step: Callable[[int, int], float], batch: int
) -> None:
    costs = Costs(step, {"mtp": share})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, batch, DraftBudget(16))
    loop.run(300 if batch == 1 else 100, lambda i, d: rate)  # each sequence of a batch shows something
    depths = loop.run(200 if batch == 1 else 64, lambda i, d: rate)
    best = goodput(costs, rate, best_depth(costs, rate, batch), batch)
    chosen = [goodput(costs, rate, round(sum(row) / batch), batch) for row in depths]
    assert sum(chosen) / len(chosen) >= 0.95 * best
    # And by tokens over seconds, probes included; the acceptance process itself scatters by some percent.
    assert loop.tokens / loop.seconds >= 0.90 * best


def test_acceptance_that_falls_with_depth_is_seen_per_depth() -> None:
    """0.9, then nothing: one mean rate of 0.47 would draft 2 or 3 deep."""
    costs = Costs(sloped, {"mtp": 0.05})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, 1, DraftBudget(8))
    loop.run(200, lambda i, d: 0.9 if d == 0 else 0.02)
    depths = [row[0] for row in loop.run(100, lambda i, d: 0.9 if d == 0 else 0.02)]
    assert depths.count(1) >= 90


def test_requests_differ_within_a_batch() -> None:
    costs = Costs(sloped, {"mtp": 0.01})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, 4, DraftBudget(8))
    rates = [0.95, 0.95, 0.1, 0.1]
    loop.run(200, lambda i, d: rates[i])
    rows = loop.run(100, lambda i, d: rates[i])
    mean = [sum(row[i] for row in rows) / len(rows) for i in range(4)]
    assert min(mean[:2]) > max(mean[2:]) + 4
    assert max(mean[2:]) < 1


def over_the_ridge(batch: int, rows: int) -> float:
    return rows / 64


def test_a_batch_over_the_ridge_drafts_nothing() -> None:
    """Compute-bound already: every further row costs a whole token's time and yields 0.7 of one."""
    costs = Costs(over_the_ridge, {"mtp": 0.02})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, 64, DraftBudget(4))
    loop.run(64, lambda i, d: 0.7)
    rows = loop.run(96, lambda i, d: 0.7)
    assert sum(max(row) == 0 for row in rows) == 93  # all but the probes
    assert loop.tokens / loop.seconds >= 0.98 * 64  # and those cost less than 2 %


def test_zero_recovers_through_probing() -> None:
    costs = Costs(sloped, {"mtp": 0.1})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp", probe_every=16), costs, 1, DraftBudget(8))
    loop.run(300, lambda i, d: 0.02)
    rows = loop.run(160, lambda i, d: 0.02)
    assert sum(row == [0] for row in rows) == 150
    assert sum(row == [1] for row in rows) == 10
    loop.run(400, lambda i, d: 0.95)
    assert min(row[0] for row in loop.run(50, lambda i, d: 0.95)) >= 5


def test_without_probes_it_never_recovers() -> None:
    """The mutant of the test above."""
    costs = Costs(sloped, {"mtp": 0.1})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp", probe_every=10**9), costs, 1, DraftBudget(8))
    loop.run(300, lambda i, d: 0.02)
    assert loop.run(400, lambda i, d: 0.95) == [[0]] * 400


def test_a_young_request_starts_from_the_deployment() -> None:
    costs = Costs(sloped, {"mtp": 0.05})
    policy = GoodputLength(costs.table(), drafter="mtp")
    Loop(policy, costs, 1, DraftBudget(8)).run(300, lambda i, d: 0.1)
    poor = policy.decide([bare_sequence(9)], [DraftBudget(8)])[0].num_draft_tokens
    Loop(policy, costs, 1, DraftBudget(8)).run(600, lambda i, d: 0.95)
    rich = policy.decide([bare_sequence(10)], [DraftBudget(8)])[0].num_draft_tokens
    assert poor <= 1
    assert rich >= 6
    other = policy.decide([bare_sequence(11, drafter="ngram")], [DraftBudget(8)])[0].num_draft_tokens
    assert other < rich  # another drafter's requests have a pool of their own


@pytest.mark.parametrize("kind", [TreeKind.STATIC, TreeKind.DYNAMIC])
def test_trees_shrink_with_the_load(kind: TreeKind) -> None:
    """Four candidates per depth pay when rows are nearly free, and not past the ridge."""
    cap = DraftBudget(4, tree_width=4, tree=kind)
    sizes = {}
    for batch, step in ((1, flat), (64, over_the_ridge)):
        costs = Costs(step, {"mtp": 0.02})
        loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, batch, cap)
        loop.run(60, lambda i, d: 0.75)
        sizes[batch] = max(budget.max_nodes for budget in loop.round(lambda i, d: 0.75))
    assert sizes == {1: cap.max_nodes, 64: 1}


def test_a_narrower_tree_is_chosen_when_width_does_not_help() -> None:
    costs = Costs(sloped, {"mtp": 0.02})
    cap = DraftBudget(4, tree_width=8)
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, 1, cap)
    loop.run(400, lambda i, d: 0.7)  # the same at every width
    rows = [loop.round(lambda i, d: 0.7)[0].max_nodes - 1 for _ in range(200)]
    assert sum(rows) / len(rows) <= 8  # of 32


def test_width_is_kept_when_it_does_help() -> None:
    costs = Costs(lambda batch, rows: 1.0 + 0.002 * rows, {"mtp": 0.02})
    loop = Loop(GoodputLength(costs.table(), drafter="mtp"), costs, 1, DraftBudget(4, tree_width=8))
    rate = {8: 0.9, 4: 0.6, 2: 0.4, 1: 0.25}
    chosen = []
    for _ in range(500):
        budget = loop.round(lambda i, d: rate[nodes_per_depth(loop.last[i])])
        chosen.append(budget[0].tree_width)
    assert chosen[300:].count(8) >= 170


ladders = st.lists(st.lists(st.floats(0.01, 0.99), max_size=4).map(reach), min_size=1, max_size=4)


@given(ladders, st.lists(st.floats(0.0, 0.4), min_size=17, max_size=17), st.floats(0.0, 0.3))
@settings(max_examples=30, deadline=None)
def test_allocation_is_the_best_there_is(gains: list[tuple[float, ...]], steps: list[float], draft: float) -> None:
    """Against every combination of depths, whatever the cost of rows (it never falls)."""
    cost = list(itertools.accumulate(steps, initial=1.0))

    def rate(depths: Seq[int]) -> float:
        tokens = len(gains) + sum(sum(g[:d]) for g, d in zip(gains, depths, strict=True))
        return tokens / (cost[sum(depths)] + draft * max(depths))

    depths, got = allocate([Ladder(g) for g in gains], cost.__getitem__, lambda depth: draft * depth)
    best = max(rate(d) for d in itertools.product(*(range(len(g) + 1) for g in gains)))
    assert got == pytest.approx(best)
    assert rate(depths) == pytest.approx(best)


def test_rows_are_spent_where_they_yield_most() -> None:
    """Four rows for 0.6 of a token are worse than one row for 0.5: taking them first would end the round there."""
    step = [1.0, 1.1, 2.0, 2.0, 2.0, 2.1]
    depths, _ = allocate([Ladder((0.6,), 4), Ladder((0.5,), 1)], step.__getitem__, lambda depth: 0.0)
    assert depths == [0, 1]


@pytest.mark.parametrize(("draft", "width"), [(0.0, 1), (0.3, 8)])
def test_dear_drafts_ask_for_wide_trees(draft: float, width: int) -> None:
    """By hand: 1.75/1.07 against 2.44/1.56 with free drafts; 1.5/1.335 against 1.8/1.58 at 0.3 per level."""
    shares = SharedView(CostTable.assumed(1.0), 1, lambda depth: draft * depth)
    assert max([Ladder((0.5, 0.25), 1), Ladder((0.8, 0.64), 8)], key=shares.goodput).rows == width


def test_goodput_of_a_shape_is_of_its_best_depth_for_the_whole_batch() -> None:
    """Rounds of 1 s and 0.1 s a row past the first, 0.2 s a draft step: depth 1 of 3 rows gives 1.8 tokens in
    1 + 0.1 * 7 + 0.2 s at a batch of 2, depth 2 gives 2.2 in 1 + 0.1 * 13 + 0.4 s, depth 0 one in 1.1 s."""
    shares = SharedView(CostTable.assumed(1.0, 0.1), 2, lambda depth: 0.2 * depth)
    assert shares.goodput(Ladder((0.8, 0.4), 3)) == pytest.approx(1.8 / 1.9)
    assert shares.goodput(Ladder((0.8, 1.9), 3)) == pytest.approx(3.7 / 2.7)
    assert shares.goodput(Ladder((0.1,), 3)) == pytest.approx(1 / 1.1)


def test_only_who_weighs_seconds_has_the_host_wait_for_drafts() -> None:
    table = Costs(flat).table()
    asks = {name: make_policy(name, table).needs_draft_time for name in ("fixed", "window", "goodput")}
    assert asks == {"fixed": False, "window": False, "goodput": True}


def test_depth_limits() -> None:
    assert depth_limits(0) == []
    assert depth_limits(3) == [1, 2, 3]
    assert depth_limits(20) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15, 18, 20]


budgets = st.builds(
    DraftBudget,
    num_draft_tokens=st.integers(0, 20),
    tree_width=st.integers(1, 9),
    tree=st.sampled_from(TreeKind),
    tree_nodes=st.integers(0, 60),
    min_confidence=st.sampled_from([0.0, 0.3, 0.6]),
)


@given(
    st.sampled_from(["fixed", "window", "goodput"]),
    st.lists(st.lists(budgets, min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_never_above_the_cap(name: str, rounds: list[list[DraftBudget]], seed: int) -> None:
    rng = random.Random(seed)
    policy = make_policy(name, CostTable.assumed(1.0), min_confidence=0.4, probe_every=2)  # type: ignore[arg-type]
    seqs = [bare_sequence(i) for i in range(3)]
    for caps in rounds:
        decided = policy.decide(seqs, caps)
        for cap, got in zip(caps, decided, strict=True):
            assert 0 <= got.num_draft_tokens <= cap.num_draft_tokens
            assert 1 <= got.tree_width <= cap.tree_width
            assert got.max_nodes <= cap.max_nodes
            assert got.tree is cap.tree
            assert got.min_confidence == max(cap.min_confidence, 0.4)
        trees = [budget_tree(seq, budget) for seq, budget in zip(seqs, decided, strict=True)]
        policy.observe(seqs, trees, [accept(rng, tree, 0.6) for tree in trees], 0.1, 1.0)


def test_lowering_a_budget() -> None:
    cap = DraftBudget(6, tree_width=10, tree=TreeKind.DYNAMIC, tree_nodes=59)
    assert nodes_per_depth(cap) == 10
    assert limited(cap, 6, 10) is cap
    assert limited(cap, 3, 5) == DraftBudget(3, 10, TreeKind.DYNAMIC, 15)
    assert limited(cap, 0, 5).max_nodes == 1
    static = DraftBudget(4, tree_width=4)
    assert limited(static, 2, 2) == DraftBudget(2, 2, TreeKind.STATIC, 4)
    assert limited(DraftBudget(4), 9, 1) == DraftBudget(4)


class TestWindow:
    """I3a, rule by rule."""

    def lengths(self, accepted: Seq[float], policy: WindowLength | None = None, cap: int = 16) -> list[int]:
        """Lengths decided before each round whose share ``accepted`` was accepted, and after the last."""
        policy = policy or WindowLength()
        seq = bare_sequence()
        found = []
        for share in accepted:
            found.append(policy.decide([seq], [DraftBudget(cap)])[0].num_draft_tokens)
            policy.observe([seq], [chain_tree(seq, found[-1])], [round(share * found[-1])], 0.0, 0.0)
        return [*found, policy.decide([seq], [DraftBudget(cap)])[0].num_draft_tokens]

    def test_grows_to_eight(self) -> None:
        assert self.lengths([1.0] * 6) == [4, 5, 6, 7, 8, 8, 8]

    def test_shrinks_to_two(self) -> None:
        assert self.lengths([0.0] * 4) == [4, 3, 2, 2, 2]

    def test_stays_between(self) -> None:
        assert self.lengths([0.5, 0.5, 0.75, 0.75]) == [4] * 5

    def test_divides_by_the_rounds_there_are(self) -> None:
        """One full round out of a window of ten is a mean of 1, not of 0.1."""
        assert self.lengths([1.0]) == [4, 5]

    def test_forgets_after_ten_rounds(self) -> None:
        grown = self.lengths([1.0] * 20)[-1]
        assert self.lengths([1.0] * 20 + [0.0] * 5)[-1] == grown  # mean 0.5 exactly
        assert self.lengths([1.0] * 20 + [0.0] * 6)[-1] == grown - 1

    def test_the_cap_counts_and_is_no_acceptance(self) -> None:
        assert self.lengths([1.0] * 6, cap=3) == [3] * 7
        assert self.lengths([0.0] * 6, cap=1) == [1] * 7
        assert self.lengths([0.0] * 6, cap=0) == [0] * 7

    def test_a_round_without_drafts_says_nothing(self) -> None:
        policy, seq = WindowLength(), bare_sequence()
        policy.observe([seq], [chain_tree(seq, 0)], [0], 0.0, 0.0)
        assert policy.decide([seq], [DraftBudget(8)])[0].num_draft_tokens == 4


def make(name: str) -> LengthPolicy:
    costs = Costs(sloped, {"mtp": 0.05})
    return make_policy(name, costs.table(), drafter="mtp")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["fixed", "window", "goodput"])
def test_same_history_same_decisions(name: str) -> None:
    costs = Costs(sloped, {"mtp": 0.05})
    runs = [Loop(make(name), costs, 3, DraftBudget(8)).run(120, lambda i, d: 0.5 + 0.1 * i) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["window", "goodput"])
def test_a_decision_does_not_know_its_own_round(name: str) -> None:
    """B7: whatever the round's randomness, the decision before it is the same; the one after it is not."""
    costs = Costs(sloped, {"mtp": 0.05})
    history = 40
    decided, after = [], []
    for outcome in (0.0, 1.0):
        loop = Loop(make(name), costs, 2, DraftBudget(8))
        loop.run(history, lambda i, d: 0.7)
        decided.append(loop.round(lambda i, d, outcome=outcome: outcome))  # type: ignore[misc]
        after.append([loop.round(lambda i, d, outcome=outcome: outcome) for _ in range(12)])  # type: ignore[misc]
    assert decided[0] == decided[1]
    assert after[0] != after[1]


def test_deciding_twice_changes_nothing_but_the_probe_count() -> None:
    policy = make("goodput")
    seqs = [bare_sequence(i) for i in range(3)]
    caps = [DraftBudget(8)] * 3
    assert policy.decide(seqs, caps) == policy.decide(seqs, caps)


def test_a_walk_that_was_cut_is_no_refusal() -> None:
    """A sequence that ends at a stop token accepted all that could be."""
    policy = make("window")
    seq = bare_sequence()
    seq.finish_reason = FinishReason.STOP
    policy.observe([seq], [chain_tree(seq, 4)], [0], 0.0, 0.0)
    assert policy.decide([seq], [DraftBudget(8)])[0].num_draft_tokens == 4


def test_fixed_is_the_cap_with_the_stricter_confidence() -> None:
    policy = FixedLength(min_confidence=0.4)
    caps = [DraftBudget(3), DraftBudget(5, min_confidence=0.9)]
    assert policy.decide([bare_sequence(), bare_sequence(1)], caps) == [DraftBudget(3, min_confidence=0.4), caps[1]]


def test_rounds_refine_the_costs() -> None:
    costs = Costs(sloped, {"mtp": 0.05})
    table = costs.table()
    policy = FixedLength(table)
    seqs: list[Sequence] = [bare_sequence(), bare_sequence(1)]
    for _ in range(200):
        trees = [chain_tree(seq, 4, "mtp") for seq in seqs]
        policy.observe(seqs, trees, [1, 1], 0.4, 2 * sloped(2, 10))
    assert table.estimate(2, 10) == pytest.approx(2 * sloped(2, 10), rel=0.02)
    assert table.draft_seconds("mtp", 2, 4) == pytest.approx(0.4, rel=0.02)
    mixed = [chain_tree(seqs[0], 4, "mtp"), chain_tree(seqs[1], 4, "ngram")]
    policy.observe(seqs, mixed, [1, 1], 0.01, 2 * sloped(2, 10))
    assert table.draft_seconds("mtp", 2, 4) == pytest.approx(0.4, rel=0.02)  # whose seconds these are is unknown


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="goodput"):
        make_policy("clever", Costs(flat).table())  # type: ignore[arg-type]
