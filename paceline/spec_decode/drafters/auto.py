"""Which drafter for a request that says ``auto``: algorithms.md L1's order to begin with, measurement from then on.

Every round each sequence has a few *arms*: the primary as a chain, the primary as a tree (small batches only), each
copying drafter (n-gram, suffix, trie) at the present *match length*, and not drafting at all. The match length is how
many of the last tokens stood together earlier in the sequence; the longer, the surer a copy goes on, so a copying
drafter has one arm per class of it. An arm is worth

    speed-up = tokens per round / (seconds of such a round / seconds of a plain step)

with the tokens, rows and draft depths that its rounds showed (per request, shrunk to all requests, shrunk to a guess
that puts the arms in the order of L1), and seconds from the cost table at the present batch, as if all sequences did
the same. A chain is as deep as is worth most by what each depth showed (algorithms.md I3c); copies end by themselves.
Not drafting has speed-up 1 by definition, so a loaded node stops drafting by itself. The best arm draws; a copy that
finds nothing hands over to the best of the others in the same round. The draft steps of the primary are shared by all
that chose it: where these are too few, none of them has it (``settle``).

An arm that is not used is never measured: now and then the one that waited longest is tried. Rounds earn an allowance
of ``probe_share`` of their time, a trial spends what it lost against the best arm, and none starts in debt. So looking
around costs at most that share, and next to nothing while the other arms are good too. What a trial shows is known for
all sequences, so a batch above ``tree_batch`` earns no more than one of that size.

Choices rest on earlier rounds, the committed tokens and measured seconds. They change the speed; under the default
acceptance rule no text. What a round came to is read from the sequence's own counts when it next drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.length.cost import COPY_SHARE, CostTable
from paceline.spec_decode.length.rates import POOL_DECAY, REQUEST_DECAY, WidthCounts, pool_rates, reach, request_rates
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.speculation import NONE

MEMORY = "auto"
CHAIN, TREE = "chain", "tree"
MATCH_CLASSES = ((8, "match 8+"), (4, "match 4-7"), (2, "match 2-3"), (1, "match 1"))  # least length, longest first
LONGEST_MATCH = 8  # longer ones count as this
ASSUMED_RATES = {TREE: 0.72, "match 8+": 0.85, "match 4-7": 0.7, "match 2-3": 0.4, "match 1": 0.2}
REQUEST_PRIOR = 6.0  # rounds of its own that the others' count as, for a request
POOL_PRIOR = 3.0  # the same for the guess and all requests
PROBE_GAP = 8  # rounds of a sequence between two of its trials of one arm
MOST_ALLOWANCE = 8.0  # plain steps saved up at most
QUARTERS = 4

AskingOrder = tuple[tuple[str, DraftBudget], ...]  # drafters to ask in order, until one finds something; never empty


@dataclass(frozen=True)
class Arm:
    """A drafter, and the shape of its tree or the class of the match it copies from."""

    drafter: str
    kind: str


@dataclass
class Outcome:
    """Decayed sums over the rounds of an arm."""

    decay: float
    rounds: float = 0.0
    tokens: float = 0.0  # committed, the bonus counted
    rows: float = 0.0  # of the tree, root included
    depth: float = 0.0

    def add(self, tokens: int, rows: int, depth: int) -> None:
        """One round."""
        self.rounds = self.decay * self.rounds + 1
        self.tokens = self.decay * self.tokens + tokens
        self.rows = self.decay * self.rows + rows
        self.depth = self.decay * self.depth + depth

    def mean(self, prior: Expected, weight: float) -> Expected:
        """Means per round, ``prior`` counted as ``weight`` rounds."""
        n = self.rounds + weight
        return Expected(
            (self.tokens + weight * prior.tokens) / n,
            (self.rows + weight * prior.rows) / n,
            (self.depth + weight * prior.depth) / n,
        )


class Expected(NamedTuple):
    """What a round of an arm comes to."""

    tokens: float
    rows: float
    depth: float


@dataclass
class CopyIndex:
    """Where each token, and each pair, was last followed by something: how long a match the last tokens have."""

    indexed: int = 1
    after: dict[tuple[int, ...], int] = field(default_factory=dict)

    def match_length(self, token_ids: Seq[int]) -> int:
        """How many of the last tokens stood together earlier: after the most recent equal pair, else token."""
        for end in range(self.indexed, len(token_ids)):
            self.after[(token_ids[end - 1],)] = end
            if end > 1:
                self.after[token_ids[end - 2], token_ids[end - 1]] = end
        self.indexed = max(self.indexed, len(token_ids))
        found = self.after.get(tuple(token_ids[-2:])) or self.after.get((token_ids[-1],))
        if found is None:
            return 0
        length = 1
        while length < min(LONGEST_MATCH, found) and token_ids[found - length - 1] == token_ids[-length - 1]:
            length += 1
        return length


class ChainBudgets:
    """Budgets of chains. Most sequences of a batch have the same budget, so those made of the last one are kept."""

    def __init__(self) -> None:
        self._whole: DraftBudget | None = None
        self._made: dict[int, DraftBudget] = {}

    def of(self, budget: DraftBudget, depth: int) -> DraftBudget:
        """``budget`` for a chain of ``depth`` draft tokens."""
        if budget is not self._whole and budget != self._whole:
            self._whole, self._made = budget, {}
        found = self._made.get(depth)
        if found is None:
            found = replace(budget, num_draft_tokens=depth, tree_width=1, tree=TreeKind.CHAIN, tree_nodes=0)
            self._made[depth] = found
        return found


@dataclass(frozen=True)
class Pending:
    """A choice whose round is not accounted for yet."""

    round: int  # seq.stats.rounds before it
    arms: tuple[Arm, ...]  # as planned, in order
    batch: int
    best: float  # speed-up of the best arm then
    trial: Arm | None
    tree: DraftTree | None = None  # what came of it


@dataclass
class AutoState:
    """What is remembered of one sequence."""

    index: CopyIndex = field(default_factory=CopyIndex)
    outcomes: dict[Arm, Outcome] = field(default_factory=dict)
    depths: WidthCounts = field(default_factory=lambda: WidthCounts(REQUEST_DECAY))  # of the primary's chains
    tried: dict[Arm, int] = field(default_factory=dict)  # arm -> round
    pending: Pending | None = None


class AutoChooser:
    """Plans each round of the sequences that say ``auto``. One per node, called from its engine thread."""

    def __init__(
        self,
        costs: CostTable,
        primary: str,
        copies: Seq[str],
        *,
        tree_batch: int = 4,
        probe_share: float = 0.02,
    ) -> None:
        """primary: the drafter with state, or ``none``. copies: drafters that repeat what stood before, best first.

        tree_batch: sequences up to which trees are worth a thought (L1), and each earns its part of trials.
        probe_share: see the module.
        """
        self.costs, self.primary, self.copies = costs, primary, tuple(copies)
        self.tree_batch, self.probe_share = tree_batch, probe_share
        self.drafters = (primary, *self.copies)
        for name in self.copies:
            costs.assume_draft(name, COPY_SHARE)
        self._chain = Arm(primary, CHAIN)
        kinds = [
            next((kind for least, kind in MATCH_CLASSES if match >= least), "") for match in range(LONGEST_MATCH + 1)
        ]
        self._copying = [tuple(Arm(name, kind) for name in self.copies) for kind in kinds]  # by match length
        self._batch, self._plain_s = 1, costs.estimate(1, 1)
        self._pool: dict[Arm, Outcome] = {}
        self._depths = WidthCounts(POOL_DECAY)
        self._allowance, self._trial_given = 0.0, False
        self._seconds: dict[tuple[str, int, int], float] = {}  # of rounds as they might be now, by arm's cost
        self._chain_s: list[float] = []  # the same of the primary's chains, by depth
        self._rates: list[float] = []  # of the primary's chains in all requests, as they were when the round began
        self._chains = ChainBudgets()
        self._sharers: list[tuple[float, int, int]] = []  # of who may ask the primary: tokens gained, rows, depth

    def start_round(self, batch: int) -> None:
        """Before the choices of a round over ``batch`` sequences, those that named a drafter included."""
        self._batch, self._plain_s = batch, self.costs.estimate(batch, batch)
        self._trial_given = False
        self._seconds.clear()
        self._chain_s.clear()
        self._rates.clear()
        self._sharers.clear()

    def choose(self, seq: Sequence, budget: DraftBudget, *, primary_ready: bool) -> AskingOrder:
        """Drafters to ask for the next tree. primary_ready: it has what it drafts from."""
        state = self._state(seq)
        self._learn(seq, state)
        if budget.num_draft_tokens == 0:
            return ((NONE, budget),)
        share = self.probe_share * min(1.0, self.tree_batch / self._batch)
        self._allowance = min(self._allowance + share, MOST_ALLOWANCE)
        arms = self._arms(seq, state, budget, primary_ready)
        worth: dict[Arm, float] = {}
        if self._chain in arms:
            depth, worth[self._chain] = self._fitted(state, budget.num_draft_tokens)
            arms[self._chain] = self._chains.of(budget, depth)
        worth |= {arm: self._speedup(state, arm, b) for arm, b in arms.items() if arm.kind != CHAIN}
        ranked = sorted((arm for arm in arms if worth[arm] > 1.0), key=lambda arm: -worth[arm])
        trial = self._trial(seq, state, [arm for arm in arms if arm not in ranked[:1]])
        if trial is not None:
            ranked = [trial, *(arm for arm in ranked if arm != trial)]
        best = max(1.0, *worth.values()) if worth else 1.0
        shared = next((arm for arm in ranked if arm.drafter == self.primary), None)
        if shared is not None and shared != trial:
            self._sharers.append(self._gain(state, shared, arms[shared]))
        state.pending = Pending(seq.stats.rounds, tuple(ranked), self._batch, best, trial)
        plan: list[tuple[str, DraftBudget]] = []
        for arm in ranked:
            plan.append((arm.drafter, arms[arm]))
            if arm.drafter == self.primary:  # it drafts last, and for all of its sequences at once
                break
        return tuple(plan) or ((NONE, budget),)

    def settle(self, seq: Sequence, budget: DraftBudget, plan: AskingOrder) -> AskingOrder:
        """A plan of this round, once all are made: the primary's draft steps take about the same for one sequence as
        for all, so it drafts only where those that chose it gain more by it together than it and their rows take."""
        state = self._state(seq)
        trial = state.pending.trial if state.pending is not None else None
        if self.primary == NONE or self._shared_pays() or (trial is not None and trial.drafter == self.primary):
            return plan
        return tuple(step for step in plan if step[0] != self.primary) or ((NONE, budget),)

    def _shared_pays(self) -> bool:
        if not self._sharers:
            return False
        gained = sum(tokens for tokens, _, _ in self._sharers) * self._plain_s / self._batch
        rows, depth = sum(rows for _, rows, _ in self._sharers), max(depth for _, _, depth in self._sharers)
        step = self.costs.estimate(self._batch, self._batch + rows) - self._plain_s
        return gained > step + self.costs.draft_seconds(self.primary, len(self._sharers), depth)

    def _gain(self, state: AutoState, arm: Arm, budget: DraftBudget) -> tuple[float, int, int]:
        depth = budget.num_draft_tokens
        if arm.kind == CHAIN:
            return sum(self._reach(state, depth)), depth, depth
        expected = self._expected(state, arm, budget)
        return expected.tokens - 1, round(expected.rows) - 1, depth

    def drafted(self, seq: Sequence, tree: DraftTree) -> None:
        """The tree that came of the last choice."""
        state = self._state(seq)
        if state.pending is not None:
            state.pending = replace(state.pending, tree=tree)

    def _arms(
        self, seq: Sequence, state: AutoState, budget: DraftBudget, primary_ready: bool
    ) -> dict[Arm, DraftBudget]:
        """What there is to choose from, in the order of L1."""
        chain = self._chains.of(budget, budget.num_draft_tokens)
        wide = budget.tree_width > 1 and budget.tree is not TreeKind.CHAIN and self._batch <= self.tree_batch
        arms: dict[Arm, DraftBudget] = {}
        if primary_ready and self.primary != NONE:
            arms[self._chain] = chain
            if wide:
                arms[Arm(self.primary, TREE)] = budget
        match = state.index.match_length(seq.token_ids) if self.copies else 0
        if match:
            arms |= dict.fromkeys(self._copying[match], budget if wide else chain)
        return arms

    def _fitted(self, state: AutoState, deepest: int) -> tuple[int, float]:
        """Depth of the primary's chain that is worth most, 1 to ``deepest``, and its speed-up."""
        for depth in range(len(self._chain_s), deepest + 1):
            self._chain_s.append(self._round_s(self.primary, 1 + depth, depth))
        tokens, found, most = 1.0, 1, 0.0
        for depth, gain in enumerate(self._reach(state, deepest), start=1):
            tokens += gain
            rate = tokens / self._chain_s[depth]
            if rate >= most:
                found, most = depth, rate
        return found, most * self._plain_s

    def _reach(self, state: AutoState, depth: int) -> tuple[float, ...]:
        if len(self._rates) < depth:
            self._rates = pool_rates(self._depths, 1, depth)
        return reach(request_rates(state.depths, self._rates[:depth], 1))

    def _worth(self, drafter: str, tokens: float, rows: float, depth: float) -> float:
        """Speed-up of a round that yields ``tokens``. Rows and depth count in quarters: the sequences of a large batch
        ask for the same few seconds over and over."""
        key = (drafter, round(QUARTERS * rows), round(QUARTERS * depth))
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = self._round_s(drafter, key[1] / QUARTERS, key[2] / QUARTERS)
        return tokens * self._plain_s / seconds

    def _round_s(self, drafter: str, rows: float, depth: float) -> float:
        """Seconds of a round in which each sequence of the batch has so many rows, drafted so deep."""
        step = self.costs.estimate(self._batch, self._batch * rows)
        return step + self.costs.draft_seconds(drafter, self._batch, depth)

    def _speedup(self, state: AutoState, arm: Arm, budget: DraftBudget) -> float:
        """The speed-up of an arm that is no chain of the primary."""
        expected = self._expected(state, arm, budget)
        return self._worth(arm.drafter, expected.tokens, expected.rows, expected.depth)

    def _expected(self, state: AutoState, arm: Arm, budget: DraftBudget) -> Expected:
        """What a round of an arm is expected to be that is no chain of the primary."""
        depth, rate = budget.num_draft_tokens, ASSUMED_RATES[arm.kind]
        tokens = (1 - rate ** (depth + 1)) / (1 - rate)  # algorithms.md B9
        expected = Expected(tokens, budget.max_nodes, depth)
        for outcomes, weight in ((self._pool, POOL_PRIOR), (state.outcomes, REQUEST_PRIOR)):
            if arm in outcomes:
                expected = outcomes[arm].mean(expected, weight)
        return expected

    def _trial(self, seq: Sequence, state: AutoState, others: Seq[Arm]) -> Arm | None:
        """The arm that waited longest, if there is something to spend on it. One sequence per round."""
        now = seq.stats.rounds
        stale = [arm for arm in others if now - state.tried.get(arm, -PROBE_GAP) >= PROBE_GAP]
        if not stale or self._allowance <= 0.0 or self._trial_given:
            return None
        arm = min(stale, key=lambda arm: state.tried.get(arm, -PROBE_GAP))
        state.tried[arm] = now
        self._trial_given = True
        return arm

    def _learn(self, seq: Sequence, state: AutoState) -> None:
        """Account for the last choice, if its round took place and drafted something."""
        pending, state.pending = state.pending, None
        if pending is None or pending.tree is None or seq.stats.rounds <= pending.round:
            return
        tree = pending.tree
        arm = next((arm for arm in pending.arms if arm.drafter == tree.drafter), None)
        if arm is None or tree.num_draft_tokens == 0:
            return
        tokens, depth = 1 + seq.stats.accepted_per_round[pending.round], max(tree.depths)
        state.tried[arm] = pending.round
        if arm.kind == CHAIN:
            for counts in (state.depths, self._depths):
                counts.add(1, depth, tokens - 1)
        else:
            for outcomes, decay in ((state.outcomes, REQUEST_DECAY), (self._pool, POOL_DECAY)):
                outcomes.setdefault(arm, Outcome(decay)).add(tokens, tree.num_nodes, depth)
        if arm == pending.trial:
            self._allowance -= max(0.0, self._trial_cost(pending.batch, tree) - tokens / pending.best)

    def _trial_cost(self, batch: int, tree: DraftTree) -> float:
        """Plain steps that one sequence's trial took. The whole batch waits for draft steps made for it alone."""
        plain = self.costs.estimate(batch, batch)
        draft = batch * self.costs.draft_seconds(tree.drafter, 1, max(tree.depths))
        return (self.costs.estimate(batch, batch * tree.num_nodes) + draft) / plain

    @staticmethod
    def _state(seq: Sequence) -> AutoState:
        state = seq.memory.get(MEMORY)
        if not isinstance(state, AutoState):
            state = seq.memory[MEMORY] = AutoState()
        return state
