"""Drive the product's acceptance rules through the enumeration of ``tests.support.enumeration``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from paceline.spec_decode.accept.acceptance import RULES, RuleFunction, TargetRows, Verification
from paceline.spec_decode.accept.coins import CoinSource
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.enumeration import Choose, Model, Probs, Round, Tokens, normalised, ranked

# Parent of each draft node, in node order; parents count nodes from 1, 0 is the root.
SHAPES: dict[str, tuple[int, ...]] = {
    "plain": (),
    "chain1": (0,),
    "chain2": (0, 1),
    "chain3": (0, 1, 2),
    "wide2": (0, 0),
    "wide3": (0, 0, 0),
    "comb": (0, 0, 1, 1),
    "both": (0, 0, 1, 2),  # siblings apart from each other, children of both
}
CHAINS = ("plain", "chain1", "chain2", "chain3")


@dataclass
class ScriptedCoins:
    """Coins whose outcomes ``choose`` gives. Throwing one twice would make outcomes depend: refused."""

    choose: Choose
    thrown: set[tuple[int, int]] = field(default_factory=set)

    def _throw(self, position: int, draw: int) -> None:
        assert (position, draw) not in self.thrown
        self.thrown.add((position, draw))

    def flip(self, probability: float, position: int, draw: int) -> bool:
        self._throw(position, draw)
        assert 0.0 <= probability <= 1.0
        return self.choose((probability, 1.0 - probability)) == 0

    def pick(self, probs: torch.Tensor, position: int, draw: int) -> int:
        self._throw(position, draw)
        return self.choose(probs.tolist())


NodeLaw = Callable[[Model, Tokens, Tokens], Probs]  # (model, committed output, tokens of the node's path) -> its law


def own_law(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path)


@dataclass
class TableRows:
    """The target at the nodes of a tree; asking twice, or for a node of no use, is refused."""

    model: Model
    prefix: Tokens
    tree: DraftTree
    choose: Choose
    node_law: NodeLaw = own_law
    asked: set[int] = field(default_factory=set)

    def _law(self, node: int) -> Probs:
        assert node not in self.asked
        self.asked.add(node)
        path = tuple(self.tree.token_ids[i] for i in self.tree.path(node)[1:])
        return self.node_law(self.model, self.prefix, path)

    def sample(self, node: int) -> int:
        return self.choose(self._law(node))

    def probs(self, node: int) -> torch.Tensor:
        return torch.tensor(self._law(node), dtype=torch.float64)


def untouched(q: Probs) -> Probs:
    return q


@cache
def as_float32(q: Probs) -> Probs:
    """The law that the float32 row of a tree stands for; drawing from it leaves the enumeration no rounding error."""
    return normalised(torch.tensor(q, dtype=torch.float32).double().tolist())


def draw_next(law: Probs, taken: Sequence[int], choose: Choose) -> int:
    """The next draw without replacement; an arbitrary other token once the support is used up."""
    rest = [0.0 if i in taken else x for i, x in enumerate(law)]
    if sum(rest) == 0.0:
        return next(i for i in range(len(law)) if i not in taken)
    return choose(normalised(rest))


def best_next(law: Probs, taken: Sequence[int], choose: Choose) -> int:
    """Greedy top-k drafting: a function of the context."""
    return ranked(law)[len(taken)]


@dataclass(frozen=True)
class Drafting:
    """How a round's tree comes about; mutants draft in one way and claim another."""

    next_token: Callable[[Probs, Sequence[int], Choose], int]
    claims_q: bool  # whether the tree carries draft_probs
    source: Callable[[Probs], Probs] = untouched  # q -> what children are drawn from
    claimed: Callable[[Probs], Probs] = untouched  # q -> what draft_probs say

    def tree(self, model: Model, prefix: Tokens, shape: str, max_depth: int, choose: Choose) -> DraftTree:
        """A tree of ``shape`` cut at ``max_depth``."""
        parents, depths = [-1], [0]
        paths: list[Tokens] = [()]
        kept = {0: 0}  # node of the shape -> node
        for index, parent in enumerate(SHAPES[shape], start=1):
            at = kept.get(parent)
            if at is None or depths[at] >= max_depth:
                continue
            siblings = [path[-1] for path, up in zip(paths, parents, strict=True) if up == at]
            token = self.next_token(as_float32(self.source(model.q(prefix + paths[at]))), siblings, choose)
            kept[index] = len(parents)
            parents.append(at)
            depths.append(depths[at] + 1)
            paths.append((*paths[at], token))
        root = prefix[-1] if prefix else 0
        tree = DraftTree((root, *(path[-1] for path in paths[1:])), tuple(parents), tuple(depths))
        if not self.claims_q:
            return tree
        claims = {at: self.claimed(model.q(prefix + paths[at])) for at in set(parents[1:])}
        return replace(tree, draft_probs={at: torch.tensor(q, dtype=torch.float32) for at, q in claims.items()})


ONE_HOT = Drafting(best_next, claims_q=False)
DRAWN = Drafting(draw_next, claims_q=True)


def rounds(
    rule: str | RuleFunction,
    drafting: Drafting,
    shape: str,
    stop: int | None = None,
    node_law: NodeLaw = own_law,
    coins_of: Callable[[Choose], CoinSource] = ScriptedCoins,
) -> Round:
    """Rounds by a rule of the product. Trees may be one deeper than the budget has use for."""
    function = RULES[rule].function if isinstance(rule, str) else rule

    def round_(model: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        tree = drafting.tree(model, prefix, shape, budget, choose)
        target: TargetRows = TableRows(model, prefix, tree, choose, node_law)
        coins = coins_of(choose)
        verdict = function(Verification(tree, target, coins, len(prefix), lambda token: token == stop, budget))
        tokens = tuple(verdict.committed(tree))
        if isinstance(coins, ScriptedCoins):  # each committed position has coins of its own, now and in later rounds
            positions = {position for position, _ in coins.thrown}
            assert positions <= set(range(len(prefix) + 1, len(prefix) + len(tokens) + 1))
        assert verdict.finish == (tokens[-1] == stop or len(tokens) == budget)
        return len(verdict.path), tokens

    return round_
