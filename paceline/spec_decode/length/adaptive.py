"""How far to draft: the depth and size of each sequence's next tree (algorithms.md I3, I4).

A policy decides before the round, from what earlier rounds showed and what they cost, never from the round's own
randomness (B7). It only lowers what the deployment and the request allow. Its memory of a sequence is
``seq.memory["length"]``; a sequence that arrives without one starts young.

========= ===================================================================================================
fixed     what the request and the deployment allow
window    the mean acceptance of the last rounds moves K by one (I3a)
goodput   the most expected tokens per second by measured acceptance and cost, K=0 included (I3c)
========= ===================================================================================================

Any of them can also ask the drafter to stop where it is unsure (``min_confidence``, I3d).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.length.cost import CostTable
from paceline.spec_decode.length.goodput import Ladder, allocate, depth_limits
from paceline.spec_decode.length.rates import POOL_DECAY, REQUEST_DECAY, WidthCounts, pool_rates, reach, request_rates
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.speculation import GRAMMAR, PREDICTION

MEMORY = "length"
PolicyName = Literal["fixed", "window", "goodput"]


class LengthPolicy(ABC):
    """Decides budgets; called from the engine thread only."""

    needs_draft_time = True  # ``observe`` must be told what drafting alone took: the host waits for the drafts

    def __init__(self, costs: CostTable | None = None, min_confidence: float = 0.0) -> None:
        """costs: refined by every observed round. min_confidence: see DraftBudget; the stricter of both counts."""
        self.costs, self.min_confidence = costs, min_confidence

    def decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        """A budget per sequence for the next round, never above its cap."""
        budgets = self._decide(seqs, caps)
        if not self.min_confidence:
            return budgets
        return [replace(b, min_confidence=max(b.min_confidence, self.min_confidence)) for b in budgets]

    def observe(
        self, seqs: Seq[Sequence], trees: Seq[DraftTree], accepted: Seq[int], draft_s: float, verify_s: float
    ) -> None:
        """What the round of the last ``decide`` came to; call it after the tokens were committed.

        accepted: draft tokens accepted, per sequence. draft_s: seconds in ``Drafter.propose``. verify_s: seconds of
        the rest (target step, sampling, extend), which a round costs whatever it drafts.
        """
        if self.costs is not None and trees:
            _refine(self.costs, trees, draft_s, verify_s)
        for seq, tree, count in zip(seqs, trees, accepted, strict=True):
            # The walk of a sequence that ended was cut, which says nothing about its next draft token.
            # Tokens that a grammar forces or that the request predicts say as little about a drafter.
            if seq.finish_reason is None and tree.num_draft_tokens and tree.drafter not in (GRAMMAR, PREDICTION):
                self._learn(seq, tree, count)

    @abstractmethod
    def _decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        """See decide."""

    def _learn(self, seq: Sequence, tree: DraftTree, accepted: int) -> None:  # noqa: B027
        """One round that drafted something."""


class FixedLength(LengthPolicy):
    """The caps themselves."""

    needs_draft_time = False

    def _decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        return list(caps)


@dataclass
class WindowState:
    """One sequence under ``WindowLength``."""

    length: int
    rates: deque[float]


class WindowLength(LengthPolicy):
    """I3a: K+1 when the last rounds accepted more than ``high`` of their depth, K-1 when less than ``low``."""

    needs_draft_time = False

    def __init__(
        self,
        costs: CostTable | None = None,
        min_confidence: float = 0.0,
        *,
        start: int = 4,
        least: int = 2,
        most: int = 8,
        window: int = 10,
        low: float = 0.5,
        high: float = 0.8,
    ) -> None:
        super().__init__(costs, min_confidence)
        self.start, self.least, self.most, self.window, self.low, self.high = start, least, most, window, low, high

    def _decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        lengths = [self._state(seq).length for seq in seqs]
        return [limited(cap, length, nodes_per_depth(cap)) for length, cap in zip(lengths, caps, strict=True)]

    def _learn(self, seq: Sequence, tree: DraftTree, accepted: int) -> None:
        state = self._state(seq)
        state.rates.append(accepted / max(tree.depths))
        mean = sum(state.rates) / len(state.rates)
        if mean > self.high:
            state.length = min(state.length + 1, self.most)
        elif mean < self.low:
            state.length = max(state.length - 1, self.least)

    def _state(self, seq: Sequence) -> WindowState:
        state = seq.memory.get(MEMORY)
        if not isinstance(state, WindowState):
            state = seq.memory[MEMORY] = WindowState(self.start, deque(maxlen=self.window))
        return state


@dataclass
class GoodputState:
    """One sequence under ``GoodputLength``."""

    drafter: str  # who made its last tree
    width: int = 1  # candidates per depth of its last budget
    counts: WidthCounts = field(default_factory=lambda: WidthCounts(REQUEST_DECAY))


class GoodputLength(LengthPolicy):
    """I3c over a whole batch, with a rate per depth, per request; see ``rates`` and ``goodput``.

    What is not drafted shows no acceptance, so every ``probe_every`` rounds each sequence drafts one deeper than it
    should (I4), and, where trees are allowed, in turn at each of the other widths. One round in 32 bounds the price
    at some 2 %, even for a batch past the ridge, where one more token each nearly doubles the step.
    """

    MAX_POOLS = 32  # drafter names that requests ask for; later ones share the pool of requests that ask for none

    def __init__(
        self, costs: CostTable, min_confidence: float = 0.0, *, drafter: str = "", probe_every: int = 32
    ) -> None:
        """drafter: whose cost counts for a sequence that has drafted nothing yet."""
        super().__init__(costs, min_confidence)
        self.table, self.drafter, self.probe_every = costs, drafter, probe_every
        self._rounds = 0
        self._pools: dict[str, WidthCounts] = {}

    def _decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        self._rounds += 1
        states, batch = [self._state(seq) for seq in seqs], len(seqs)
        sizes: dict[str, int] = {}  # sequences that may draft, by drafter: each drafter steps all of its own together
        for state, cap in zip(states, caps, strict=True):
            sizes[state.drafter] = sizes.get(state.drafter, 0) + (cap.num_draft_tokens > 0)

        def verify_s(rows: int) -> float:
            return self.table.estimate(batch, batch + rows)

        def draft_s(depth: int) -> float:
            return sum(self.table.draft_seconds(name, size, depth) for name, size in sizes.items())

        shared = SharedView(self.table, batch, draft_s)
        ladders = [self._ladder(seq, state, cap, shared) for seq, state, cap in zip(seqs, states, caps, strict=True)]
        depths, _ = allocate(ladders, verify_s, draft_s)
        probes, rest = divmod(self._rounds, self.probe_every)
        budgets = []
        for state, cap, ladder, depth in zip(states, caps, ladders, depths, strict=True):
            state.width = ladder.rows
            if rest == 0:
                among = widths(nodes_per_depth(cap))
                state.width = among[probes % len(among)] if depth else 1
                depth += 1
            budgets.append(limited(cap, depth, state.width))
        return budgets

    def _ladder(self, seq: Sequence, state: GoodputState, cap: DraftBudget, shared: SharedView) -> Ladder:
        """The best of the widths that ``cap`` allows, were the whole batch to draft alike."""
        pool = self._pool(seq)
        ladders = []
        for width in widths(nodes_per_depth(cap)):
            rates = request_rates(state.counts, shared.rates(pool, width, cap.num_draft_tokens), width)
            ladders.append(Ladder(reach(rates), width))
        return ladders[0] if len(ladders) == 1 else max(ladders, key=shared.goodput)

    def _learn(self, seq: Sequence, tree: DraftTree, accepted: int) -> None:
        state = self._state(seq)
        state.drafter = tree.drafter
        for counts in (state.counts, self._pool(seq)):
            counts.add(state.width, max(tree.depths), accepted)

    def _pool(self, seq: Sequence) -> WidthCounts:
        name = seq.request.speculation.drafter or ""
        if name not in self._pools and len(self._pools) >= self.MAX_POOLS:
            name = ""
        return self._pools.setdefault(name, WidthCounts(POOL_DECAY))

    def _state(self, seq: Sequence) -> GoodputState:
        state = seq.memory.get(MEMORY)
        if not isinstance(state, GoodputState):
            state = seq.memory[MEMORY] = GoodputState(self.drafter)
        return state


class SharedView:
    """What the sequences of one decision share: the deployment's rates, and the seconds of a batch that drafts alike,
    by which the widths of one sequence's tree are compared."""

    def __init__(self, table: CostTable, batch: int, draft_s: Callable[[int], float]) -> None:
        self.table, self.batch, self.draft_s = table, batch, draft_s
        self._seconds: dict[tuple[int, int], float] = {}
        self._rates: dict[tuple[int, int, int], list[float]] = {}

    def rates(self, pool: WidthCounts, width: int, depth: int) -> list[float]:
        """See pool_rates."""
        key = (id(pool), width, depth)
        if key not in self._rates:
            self._rates[key] = pool_rates(pool, width, depth)
        return self._rates[key]

    def goodput(self, ladder: Ladder) -> float:
        """The best over its depths."""
        return max(
            ((1.0 + sum(ladder.gains[:depth])) / self._round_s(depth, ladder.rows))
            for depth in (0, *depth_limits(len(ladder.gains)))
        )

    def _round_s(self, depth: int, rows: int) -> float:
        if (depth, rows) not in self._seconds:
            step = self.table.estimate(self.batch, self.batch * (1 + depth * rows))
            self._seconds[depth, rows] = step + (self.draft_s(depth) if depth else 0.0)
        return self._seconds[depth, rows]


def nodes_per_depth(cap: DraftBudget) -> int:
    """Candidates per depth that ``cap`` pays for, at least 1."""
    return max(1, -(-(cap.max_nodes - 1) // max(cap.num_draft_tokens, 1)))


def widths(most: int) -> list[int]:
    """``most`` and its halves, widest first, down to the chain."""
    found = [most]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found


def limited(cap: DraftBudget, depth: int, width: int) -> DraftBudget:
    """``cap`` lowered to ``depth`` and about ``width`` nodes per depth."""
    if depth >= cap.num_draft_tokens and width >= nodes_per_depth(cap):
        return cap
    depth = min(depth, cap.num_draft_tokens, cap.max_nodes - 1)
    if depth == 0 or cap.tree is TreeKind.CHAIN or cap.tree_width == 1:
        return replace(cap, num_draft_tokens=depth)
    nodes = min(cap.max_nodes - 1, depth * width)
    if cap.tree is TreeKind.STATIC:
        return replace(cap, num_draft_tokens=depth, tree_width=min(width, cap.tree_width), tree_nodes=nodes)
    return replace(cap, num_draft_tokens=depth, tree_nodes=nodes)


def make_policy(
    name: PolicyName, costs: CostTable, *, min_confidence: float = 0.0, drafter: str = "", probe_every: int = 32
) -> LengthPolicy:
    """The policy of that name; ``drafter`` and ``probe_every`` are goodput's."""
    if name == "fixed":
        return FixedLength(costs, min_confidence)
    if name == "window":
        return WindowLength(costs, min_confidence)
    if name == "goodput":
        return GoodputLength(costs, min_confidence, drafter=drafter, probe_every=probe_every)
    raise ValueError(f"no draft-length policy named {name!r}: fixed, window or goodput")


def _refine(costs: CostTable, trees: Seq[DraftTree], draft_s: float, verify_s: float) -> None:
    costs.observe(len(trees), sum(tree.num_nodes for tree in trees), verify_s)
    drafted = [tree for tree in trees if tree.num_draft_tokens]
    names = {tree.drafter for tree in drafted}
    if len(names) == 1:  # the seconds of several drafters cannot be told apart
        costs.observe_draft(names.pop(), len(drafted), max(max(tree.depths) for tree in drafted), draft_s)
