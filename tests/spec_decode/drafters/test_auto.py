"""``auto`` in simulated worlds: a known text, drafters that know it more or less, an explicit cost model, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import pytest

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.drafters.auto import Arm, AutoChooser, CopyIndex, Pending
from paceline.spec_decode.drafters.ngram import NgramDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.drafters.select import SelectingDrafter
from paceline.spec_decode.length.cost import COPY_SHARE, DRAFT_SHARE, CostTable
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.simulated_rounds import Costs, bare_sequence, chain_tree, commit

VOCAB = 100_000
K = 4


class Scripted(Drafter):
    """A head that knows the text: each token right with ``rate``, times ``fade`` a depth; a tree's second candidate
    with ``second`` more."""

    name = "head"

    def __init__(
        self, text: Seq[int], rate: Callable[[int], float], second: float = 0.0, fade: float = 1.0, seed: int = 5
    ) -> None:
        self.text, self.rate, self.second, self.fade, self.rng = text, rate, second, fade, random.Random(seed)

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _tree(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        pairs: list[tuple[int, int]] = []
        at, spine = len(seq.token_ids), -1
        for d in range(budget.num_draft_tokens):
            luck, right = self.rng.random(), self.text[at + d]
            first = len(pairs)
            rate = self.rate(at) * self.fade**d
            hit = 0 if luck < rate else 1 if luck < rate + self.second else -1
            pairs += [(spine, right if rank == hit else VOCAB - 1 - rank) for rank in range(budget.tree_width)]
            spine = first + (hit if 0 <= hit < budget.tree_width else 0)
        return build_tree(seq.token_ids[-1], pairs, VOCAB, budget.max_nodes, budget.num_draft_tokens)


def novel(length: int) -> list[int]:
    """No token twice."""
    return list(range(3, length + 3))


def copying(length: int, share: float, seed: int = 3) -> list[int]:
    """Stretches of some 25 tokens, ``share`` of them copied from before, the others new."""
    rng = random.Random(seed)
    text, fresh = novel(60), 100
    while len(text) < length:
        size = rng.randrange(15, 36)
        if rng.random() < share:
            start = rng.randrange(len(text) - size)
            text += text[start : start + size]
        else:
            text += range(fresh, fresh + size)
            fresh += size
    return text


def chatter(length: int, seed: int = 4) -> list[int]:
    """Pairs repeat all the time, and nothing follows from it."""
    rng = random.Random(seed)
    return [rng.randrange(3, 15) for _ in range(length)]


@dataclass
class World:
    """A text, a head, and what rounds cost."""

    text: list[int]
    rate: Callable[[int], float]
    costs: Costs
    width: int = 1
    second: float = 0.0
    fade: float = 1.0

    def selecting(self) -> SelectingDrafter:
        head = Scripted(self.text, self.rate, self.second, self.fade)
        chooser = AutoChooser(self.costs.table(), "head", ["ngram"])
        return SelectingDrafter(head, {"ngram": NgramDrafter(VOCAB)}, "auto", chooser)

    def run(self, choice: str, batch: int = 1, warm_up: int = 1500, width: int | None = None, depth: int = K) -> float:
        """Tokens per second after ``warm_up`` tokens, all sequences on the same text under ``choice``."""
        drafter = self.selecting()
        seqs = [bare_sequence(i, self.text[:40], drafter=choice) for i in range(batch)]
        for seq in seqs:
            seq.token_ids[-1:] = [self.text[40]]
        tokens, seconds = 0, 0.0
        while min(len(seq.token_ids) for seq in seqs) < len(self.text) - 2 * depth:
            seqs = [seq for seq in seqs if len(seq.token_ids) < len(self.text) - 2 * depth]
            trees = drafter.propose(seqs, [DraftBudget(depth, width or self.width)] * len(seqs))
            for seq, tree in zip(seqs, trees, strict=True):
                commit_true(seq, tree, self.text)
            if len(seqs[0].token_ids) > warm_up:
                tokens += sum(seq.stats.accepted_per_round[-1] + 1 for seq in seqs)
                seconds += self.costs.draft_s(trees) + self.costs.verify_s(trees)
        return tokens / seconds


def commit_true(seq: Sequence, tree: DraftTree, text: Seq[int]) -> None:
    """Walk the tree along the text."""
    at, node, accepted = len(seq.token_ids), 0, 0
    while (child := tree.child(node, text[at + accepted])) is not None:
        node, accepted = child, accepted + 1
    commit(seq, tree, accepted, text[at : at + accepted + 1])


def sloped(batch: int, rows: int) -> float:
    return 1.0 + 0.035 * (rows - 1)


def over_the_ridge(batch: int, rows: int) -> float:
    return rows / 8


GOOD, POOR = {"head": 0.05, "ngram": 0.001}, {"head": 0.3, "ngram": 0.001}
WORLDS = {
    "a good head": World(novel(6000), lambda at: 0.75, Costs(sloped, GOOD)),
    "a useless head": World(novel(5000), lambda at: 0.03, Costs(sloped, POOR)),
    "copies, a fair head": World(copying(8000, 0.9), lambda at: 0.5, Costs(sloped, POOR)),
    "copies, a better head": World(copying(8000, 0.9), lambda at: 0.97, Costs(sloped, GOOD)),
    "half copies": World(copying(8000, 0.5), lambda at: 0.6, Costs(sloped, GOOD)),
    "chatter": World(chatter(5000), lambda at: 0.05, Costs(sloped, POOR)),
    "a good tree": World(novel(6000), lambda at: 0.6, Costs(sloped, GOOD), width=2, second=0.35),
    "a wasted tree": World(novel(6000), lambda at: 0.8, Costs(sloped, GOOD), width=3, second=0.0),
}


@pytest.mark.parametrize("name", WORLDS)
def test_auto_is_near_the_best_arm_and_never_far_under_none(name: str) -> None:
    world = WORLDS[name]
    auto = world.run("auto")
    arms = {choice: world.run(choice) for choice in ("none", "head", "ngram")}
    arms["chain"] = world.run("head", width=1)
    assert auto >= 0.95 * max(arms.values()), (auto, arms)
    assert auto >= 0.97 * arms["none"], (auto, arms)


@pytest.mark.parametrize(("fade", "cost"), [(1.0, 0.02), (0.7, 0.05), (0.3, 0.2), (0.05, 0.3)])
def test_a_chain_is_as_deep_as_it_pays(fade: float, cost: float) -> None:
    """With room for 12, as fast as the best fixed length."""
    world = World(novel(6000), lambda at: 0.9, Costs(sloped, {"head": cost, "ngram": 0.001}), fade=fade)
    fixed = {depth: world.run("head", depth=depth) for depth in (1, 2, 3, 4, 6, 8, 12)}
    assert world.run("auto", depth=12) >= 0.97 * max(fixed.values()), fixed


def test_a_chain_of_fixed_depth_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above."""
    monkeypatch.setattr(AutoChooser, "_fitted", lambda self, state, deepest: (deepest, 2.0))
    world = World(novel(6000), lambda at: 0.9, Costs(sloped, {"head": 0.2, "ngram": 0.001}), fade=0.3)
    assert world.run("auto", depth=12) < 0.9 * world.run("head", depth=1)


def test_a_copy_first_else_the_head_beats_both() -> None:
    """Where half of the text is copied, neither drafter alone is as good."""
    world = World(copying(8000, 0.5), lambda at: 0.5, Costs(sloped, GOOD))
    assert world.run("auto") >= 1.05 * max(world.run("head"), world.run("ngram"))


def test_past_the_ridge_auto_stops_drafting() -> None:
    world = World(novel(1200), lambda at: 0.6, Costs(over_the_ridge, GOOD))
    assert world.run("auto", batch=8, warm_up=400) >= 0.97 * world.run("none", batch=8, warm_up=400)


def test_a_head_that_becomes_good_is_found_again() -> None:
    world = World(novel(9000), lambda at: 0.0 if at < 3000 else 0.9, Costs(sloped, GOOD))
    good = World(world.text, lambda at: 0.9, world.costs)
    assert world.run("auto", warm_up=6000) >= 0.95 * good.run("head", warm_up=6000)


def test_without_trials_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the test above."""
    monkeypatch.setattr(AutoChooser, "_trial", lambda *_: None)
    world = World(novel(9000), lambda at: 0.0 if at < 3000 else 0.9, Costs(sloped, GOOD))
    assert world.run("auto", warm_up=6000) < 0.7 * world.run("head", warm_up=6000)


@pytest.mark.parametrize(("batch", "share"), [(1, 0.025), (16, 0.01)])
def test_trials_spend_no_more_than_their_share(batch: int, share: float) -> None:
    """Everything but plain steps is waste here; count it over the whole life, warm-up included from round 200. Mutant:
    a batch of 16 earns as many trials as sixteen nodes."""
    world, how = WORLDS["a useless head"], {"batch": batch, "warm_up": 200}
    assert world.run("auto", **how) >= (1 - share) * world.run("none", **how)


def plan_names(chooser: AutoChooser, seq: Sequence, budget: DraftBudget, batch: int = 1) -> list[str]:
    chooser.start_round(batch)
    return [name for name, _ in chooser.choose(seq, budget, primary_ready=True)]


def chooser() -> AutoChooser:
    return AutoChooser(Costs(sloped, GOOD).table(), "head", ["ngram"])


def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoChooser, "_trial", lambda *_: None)


def test_before_anything_is_known_the_order_is_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    no_trials(monkeypatch)
    assert plan_names(chooser(), bare_sequence(), DraftBudget(4)) == ["head"]
    long_match = bare_sequence(prompt=[*range(10, 30), *range(10, 24)])
    long_match.token_ids[-1] = 24
    assert plan_names(chooser(), long_match, DraftBudget(4)) == ["ngram", "head"]
    assert plan_names(chooser(), bare_sequence(), DraftBudget(0)) == ["none"]
    loaded = AutoChooser(Costs(over_the_ridge, GOOD).table(), "head", ["ngram"])
    assert plan_names(loaded, long_match, DraftBudget(4), batch=32) == ["none"]


@pytest.mark.parametrize(("good", "drafts"), [(16, True), (10, True), (1, False), (0, False)])
def test_draft_steps_that_too_few_would_share_are_not_made(
    good: int, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft step takes 0.3 plain steps for however many sequences, and saves each of 16 at most a sixteenth."""
    no_trials(monkeypatch)
    flat = Costs(lambda batch, rows: 1.0 + 0.002 * (rows - 1), {"head": 0.3, "ngram": 0.001})
    auto = AutoChooser(flat.table(), "head", ["ngram"])
    seqs, budget = [bare_sequence(i) for i in range(16)], DraftBudget(4)
    for i, seq in enumerate(seqs):
        for _ in range(60):
            auto._state(seq).depths.add(1, 4, 4 if i < good else 0)
    auto.start_round(16)
    plans = [auto.choose(seq, budget, primary_ready=True) for seq in seqs]
    assert [plan[0][0] for plan in plans] == ["head"] * good + ["none"] * (16 - good)
    settled = [auto.settle(seq, budget, plan) for seq, plan in zip(seqs, plans, strict=True)]
    assert [plan[0][0] for plan in settled] == (["head"] * good if drafts else ["none"] * good) + ["none"] * (16 - good)


@pytest.mark.parametrize(("deep_gain", "drafts"), [(0.9, True), (0.2, False)])
def test_all_that_share_draft_steps_wait_for_the_deepest(deep_gain: float, drafts: bool) -> None:
    """By hand, for a batch of 2: tokens worth (0.5 + deep_gain) / 2 plain steps against 4 draft steps of 0.15 each."""
    flat = Costs(lambda batch, rows: 1.0, {"head": 0.15})
    auto = AutoChooser(flat.table(), "head", [])
    auto.start_round(2)
    auto._sharers = [(0.5, 1, 1), (deep_gain, 4, 4)]  # tokens gained, rows, depth
    budget = DraftBudget(4)
    plan = auto.settle(bare_sequence(), budget, (("head", budget),))
    assert plan[0][0] == ("head" if drafts else "none")


def test_the_rows_of_all_that_share_draft_steps_are_paid_for() -> None:
    """By hand, for a batch of 2: 0.8 / 2 plain steps against 2 rows of 0.2 each and a draft step of 0.1."""
    steep = Costs(lambda batch, rows: 1.0 + 0.2 * (rows - batch), {"head": 0.1})
    auto = AutoChooser(steep.table(), "head", [])
    auto.start_round(2)
    auto._sharers = [(0.5, 1, 1), (0.3, 1, 1)]
    budget = DraftBudget(4)
    assert auto.settle(bare_sequence(), budget, (("head", budget),)) == (("none", budget),)


def test_copies_cost_next_to_nothing_until_they_are_timed() -> None:
    table = CostTable.assumed(1.0)
    AutoChooser(table, "head", ["ngram", "suffix"])
    assert [table.draft_seconds(name, 1, 4) for name in ("ngram", "suffix")] == [4 * COPY_SHARE] * 2
    assert table.draft_seconds("head", 1, 4) == 4 * DRAFT_SHARE


def test_copies_and_trials_go_on_where_draft_steps_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = Costs(lambda batch, rows: 1.0 + 0.002 * (rows - 1), {"head": 0.3, "ngram": 0.001})
    auto = AutoChooser(flat.table(), "head", ["ngram"])
    copying_one = bare_sequence(prompt=[*range(10, 30), *range(10, 24)])
    copying_one.token_ids[-1] = 24
    budget, none = DraftBudget(4), ("none", DraftBudget(4))
    plan = (("ngram", budget), ("head", budget))
    auto.start_round(16)
    assert auto.settle(copying_one, budget, plan) == (("ngram", budget),)
    assert auto.settle(copying_one, budget, (("head", budget),)) == (none,)
    state = auto._state(copying_one)
    state.pending = Pending(0, (), 16, 1.0, Arm("head", "chain"))
    assert auto.settle(copying_one, budget, (("head", budget),)) == (("head", budget),)


def test_a_primary_without_state_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    no_trials(monkeypatch)
    auto = chooser()
    auto.start_round(1)
    assert auto.choose(bare_sequence(), DraftBudget(4), primary_ready=False) == (("none", DraftBudget(4)),)


def test_trees_only_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: trees up to a batch of 4, whatever they are worth."""
    no_trials(monkeypatch)
    auto = AutoChooser(Costs(lambda batch, rows: 1.0, GOOD).table(), "head", [])
    budget = DraftBudget(4, tree_width=3)
    for batch, expected in ((1, 3), (4, 3), (5, 1)):
        auto.start_round(batch)
        ((name, got),) = auto.choose(bare_sequence(batch), budget, primary_ready=True)
        assert (name, got.tree_width) == ("head", expected)
        assert got.max_nodes <= budget.max_nodes
        assert (got.tree is TreeKind.CHAIN) == (expected == 1)


def test_same_history_same_plans_and_no_look_at_the_round_itself() -> None:
    world = WORLDS["half copies"]

    def plans(last: bool) -> list[tuple[str, tuple[int, ...]]]:
        """Who drafted in 60 rounds; in the last of them everything is refused when not ``last``."""
        drafter, seq = world.selecting(), bare_sequence(0, world.text[:40], drafter="auto")
        seq.token_ids[-1:] = [world.text[40]]
        made = []
        for i in range(60):
            tree = drafter.propose([seq], [DraftBudget(K)])[0]
            made.append((tree.drafter, tree.token_ids))
            if i < 59 or last:
                commit_true(seq, tree, world.text)
            else:
                commit(seq, tree, 0)
        return made

    assert plans(True) == plans(False)


def test_an_aborted_round_teaches_nothing() -> None:
    auto, seq = chooser(), bare_sequence()
    plan_names(auto, seq, DraftBudget(4))
    auto.drafted(seq, chain_tree(seq, 4, "head"))
    plan_names(auto, seq, DraftBudget(4))  # the round in between was never committed
    assert auto._depths.by_width == {}
    auto.drafted(seq, chain_tree(seq, 4, "head"))
    commit(seq, chain_tree(seq, 4, "head"), 2)
    plan_names(auto, seq, DraftBudget(4))
    counts = auto._depths.by_width[1]
    assert (counts.hits, counts.trials) == ([1, 1, 0], [1, 1, 1])  # the fourth was never reached


def test_match_length() -> None:
    def length(tokens: Seq[int]) -> int:
        return CopyIndex().match_length(tokens)

    assert length([1]) == length([1, 2]) == length([1, 2, 3]) == 0
    assert length([1, 2, 3, 1, 2]) == 2
    assert length([5, 6, 7, 8, 5, 6, 7]) == 3
    assert length([4, 1, 4]) == 1
    assert length([4, 4, 4]) == 2
    assert length([4] * 20) == 8
    assert length([9, 1, 2, 3, 8, 1, 2, 5, 9, 1, 2]) == 2  # of the most recent pair
    assert length([1, 2, 9, 2, 5, 1, 2]) == 2  # a pair comes before a more recent token
    tokens = [random.Random(1).randrange(4) for _ in range(60)]
    growing = CopyIndex()
    for end in range(1, 61):
        assert growing.match_length(tokens[:end]) == length(tokens[:end])


def test_no_drafter_with_state_is_needed() -> None:
    world = World(copying(4000, 0.9), lambda at: 0.0, Costs(sloped, GOOD))
    auto = AutoChooser(world.costs.table(), "none", ["ngram"])
    drafter = SelectingDrafter(NoDrafter(), {"ngram": NgramDrafter(VOCAB)}, "auto", auto)
    seq = bare_sequence(0, world.text[:40])
    seq.token_ids[-1:] = [world.text[40]]
    while len(seq.token_ids) < 3900:
        commit_true(seq, drafter.propose([seq], [DraftBudget(K)])[0], world.text)
    assert seq.stats.acceptance_length > 2
