"""What a grammar makes of a drafted tree: branches that it refuses are left out, and where it leaves one token only,
that token stands in the tree in place of whatever was drafted. A forced token is never refused, since the target's law
has all its mass there.

Which nodes change is a function of the tokens before them and of nothing that verification draws, so that every
acceptance rule keeps its law (algorithms.md B7). Children that were *drawn* from q are the exception: without the
refused ones they were no draws from q any more (B6). Those stay, and the target's law, which is 0 there, refuses them.
At a node with one allowed token the law is that token whatever q was, so it may replace them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from paceline.errors import InvalidRequest
from paceline.grammar.cursor import Allowed
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.speculation import GRAMMAR

MAX_FORCED = 16  # forced tokens of one tree


Runs = list[list[int]]  # of each sequence, the tokens that its grammar forces next


def forced_runs(
    seqs: Seq[Sequence], budgets: Seq[DraftBudget], tokens_left: Seq[int]
) -> tuple[Runs, list[DraftBudget]]:
    """What grammars force next, and what is left for the drafter to do: nothing where a run fills its budget, or the
    request turned speculation off. Without a grammar the budget stays as it is.

    tokens_left: how many tokens each sequence may still get.
    """
    runs = [
        _forced_run(seq, min(MAX_FORCED, left - 1)) if _drafts(seq) else []
        for seq, left in zip(seqs, tokens_left, strict=True)
    ]
    rest = [
        replace(budget, num_draft_tokens=0) if run and len(run) >= budget.num_draft_tokens else budget
        for run, budget in zip(runs, budgets, strict=True)
    ]
    return runs, rest


def fit_trees(
    seqs: Seq[Sequence], trees: Seq[DraftTree], runs: Runs, tokens_left: Seq[int], *, keeps_draws: bool
) -> list[DraftTree]:
    """The round's trees under the grammars of their sequences. keeps_draws: the rule for sampled requests reads
    ``draft_probs``.

    Forced tokens need no slots of their own: a chain is never longer than the tokens that are left to emit, which have
    their slots, and a drafter's tree has its slots besides.
    """
    done = []
    for seq, tree, run, left in zip(seqs, trees, runs, tokens_left, strict=True):
        if not _drafts(seq):
            done.append(tree)
        elif tree.num_draft_tokens == 0:
            done.append(forced_chain(seq, run) if run else tree)
        else:
            room = min(tree.num_nodes + MAX_FORCED, len(seq.table.slots) - seq.num_computed)
            done.append(fitted(seq, tree, FitLimits(room, left - 1, keeps_draws)))
    return done


def _drafts(seq: Sequence) -> bool:
    """Whether its grammar has a say in its drafts: a request that turned speculation off has none."""
    return seq.grammar is not None and seq.request.speculation.num_draft_tokens != 0


@dataclass(frozen=True)
class FitLimits:
    """Bounds of a fitted tree."""

    max_nodes: int  # root included
    max_depth: int
    keeps_draws: bool  # the rule for sampled requests reads ``draft_probs``


def _forced_run(seq: Sequence, most: int) -> list[int]:
    """Tokens that the grammar forces next, one after the other, at most ``most``."""
    run: list[int] = []
    while len(run) < most:
        allowed = _allowed(seq, tuple(run))
        if allowed is None or allowed.forced is None or allowed.forced in seq.request.params.stop_token_ids:
            break
        run.append(allowed.forced)
    return run


def forced_chain(seq: Sequence, run: list[int]) -> DraftTree:
    """A tree of forced tokens alone."""
    nodes = range(len(run) + 1)
    return DraftTree((seq.token_ids[-1], *run), tuple(i - 1 for i in nodes), tuple(nodes), None, GRAMMAR)


def fitted(seq: Sequence, tree: DraftTree, limits: FitLimits) -> DraftTree:
    """``tree`` as the grammar of ``seq`` has it. A sequence without a grammar keeps its own."""
    if seq.grammar is None:
        return tree
    fit = _Fit(seq, tree, limits)
    node = 0
    while node < len(fit.token_ids):
        fit.expand(node)
        node += 1
    return fit.tree()


@dataclass
class _Fit:
    """The tree in the making. Lists are by node; ``source`` is the drafter's node, if it drafted this one."""

    seq: Sequence
    drafted: DraftTree
    limits: FitLimits
    token_ids: list[int] = field(init=False)
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    source: list[int | None] = field(default_factory=lambda: [0])
    forced: int = 0  # tokens that the drafter did not draft
    laws: dict[int, torch.Tensor] = field(default_factory=dict)  # q after a node

    def __post_init__(self) -> None:
        self.token_ids = [self.drafted.token_ids[0]]
        read = self.limits.keeps_draws and self.seq.request.params.temperature > 0.0
        self.laws_drafted = self.drafted.draft_probs if read else None
        self.children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.drafted.parents):
            self.children.setdefault(parent, []).append(node)

    def expand(self, node: int) -> None:
        """Give ``node`` its children."""
        ends = node > 0 and self.token_ids[node] in self.seq.request.params.stop_token_ids
        if ends or self.depths[node] >= self.limits.max_depth:
            return
        source = self.source[node]
        below = self.children.get(source, []) if source is not None else []
        if not below and self.forced >= MAX_FORCED:
            return
        allowed = _allowed(self.seq, self._path(node))
        if allowed is None:
            return
        if allowed.forced is not None and allowed.forced not in self.seq.request.params.stop_token_ids:
            self._force(node, allowed, below)
            return
        for child in below:
            self._keep(node, child, allowed)

    def _force(self, node: int, allowed: Allowed, below: list[int]) -> None:
        token = allowed.forced
        assert token is not None
        same = next((child for child in below if self.drafted.token_ids[child] == token), None)
        if same is None and self.forced >= MAX_FORCED:
            return
        self.forced += same is None
        if self._add(node, token, same) and self.laws_drafted is not None:
            self.laws[node] = _one_hot(token, len(allowed.mask))

    def _keep(self, node: int, child: int, allowed: Allowed) -> None:
        token = self.drafted.token_ids[child]
        drawn = self.laws_drafted is not None
        if (drawn or allowed.mask[token]) and self._add(node, token, child) and self.laws_drafted is not None:
            self.laws[node] = self.laws_drafted[self.drafted.parents[child]]

    def _add(self, parent: int, token: int, source: int | None) -> bool:
        if len(self.token_ids) >= self.limits.max_nodes:
            return False
        self.token_ids.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.source.append(source)
        return True

    def _path(self, node: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node > 0:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def tree(self) -> DraftTree:
        """The fitted tree, named after the drafter unless nothing of its own is in it."""
        own = any(source for source in self.source)
        name = self.drafted.drafter if own or len(self.token_ids) == 1 else GRAMMAR
        laws = self.laws if self.laws_drafted is not None else None
        return DraftTree(tuple(self.token_ids), tuple(self.parents), tuple(self.depths), laws, name)


def _one_hot(token: int, vocab_size: int) -> torch.Tensor:
    law = torch.zeros(vocab_size)
    law[token] = 1.0
    return law


def _allowed(seq: Sequence, path: tuple[int, ...]) -> Allowed | None:
    """None where the grammar refuses the path or fails: nothing is drafted there, and the judge meets it if need be."""
    assert seq.grammar is not None
    try:
        return seq.grammar.allowed(seq.output_token_ids, path)
    except InvalidRequest:
        return None
