"""The selectable acceptance rules (algorithms.md B); pure functions of tree, target, coins and budget.

========== ======== ====== ==========================================================================================
rule       lossless trees  what it does
========== ======== ====== ==========================================================================================
sample     yes      any    the default: sample the target's token, go to the child that carries it (B5c)
rejection  yes      chains Leviathan et al. 2211.17192, Chen et al. 2302.01318: accept d with min(1, p(d) / q(d)) (B1)
recursive  yes      any    recursive rejection of siblings drawn without replacement (B6, Sequoia 2402.12374); for
                           children that were not drawn, the EAGLE walk (B5a)
typical    no       any    Medusa's typical acceptance (C3, 2401.10774)
========== ======== ====== ==========================================================================================

"Lossless" is in law: the text follows the target's distribution. ``sample`` alone promises more, the very tokens of
plain decoding whatever was drafted; under the other rules the tokens of a seed depend on the drafts. At temperature 0
callers use ``sample``, which needs no probabilities; every rule gives the greedy tokens there, typical too.

All rules end the walk at a stop token, which is committed and never descended into, and at ``max_new_tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch

from paceline.request import FinishReason
from paceline.spec_decode.accept.coins import CoinSource
from paceline.spec_decode.accept.verify import Verdict, walk
from paceline.spec_decode.trees.tree import DraftTree

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


class TargetRows(Protocol):
    """The target at the nodes of one tree. A rule asks at most once per node, and only for nodes it reaches."""

    def sample(self, node: int) -> int:
        """The token that plain decoding would sample after ``node``."""

    def probs(self, node: int) -> torch.Tensor:
        """Its law, float64 [V], sum 1: after penalties with the node's own path, temperature and cuts (B4)."""


@dataclass(frozen=True)
class Verification:
    """What a rule decides over: the tree of one sequence and the target's word on it."""

    tree: DraftTree
    target: TargetRows
    coins: CoinSource
    root_position: int  # absolute position m of the tree's root
    is_stop: Callable[[int], bool]
    max_new_tokens: int  # at least 1; rules raise ValueError otherwise


RuleFunction = Callable[[Verification], Verdict]  # what one round commits


def sample(v: Verification) -> Verdict:
    """The default rule (B5c); it throws no coin."""
    return walk(v.tree, v.target.sample, v.is_stop, v.max_new_tokens)


def rejection(v: Verification) -> Verdict:
    """Rejection sampling along a chain (B1): the recursive rule where each node has one child.

    ``tree.draft_probs[node]`` is the q that the child was drawn from; without it q is one-hot (B2). Raises ValueError
    for a tree that branches.
    """
    if not v.tree.is_chain:
        raise ValueError("rejection sampling takes chains; use the recursive rule for trees that branch")
    return recursive(v)


def recursive(v: Verification) -> Verdict:
    """Recursive rejection over the siblings of each node, in the order of their index (B6; B5a without draft_probs).

    Exact when the children of a node are the first draws from q, all of them: a sibling that was pruned by its score
    leaves children that are no longer draws from q. Without draft_probs they may be chosen in any way that knows
    nothing of the coins. q is float32; the law is off by its rounding, under about 1e-6.

    A rejected child has no probability left, so the decided token is carried by a child exactly when that child was
    accepted. Hence the default rule's walk serves here as well.
    """

    def decide(node: int) -> int:
        position = v.root_position + v.tree.depths[node] + 1
        return _decide(v.target.probs(node), _draft_law(v.tree, node), _children(v.tree, node), v.coins, position)

    return walk(v.tree, decide, v.is_stop, v.max_new_tokens)


def _children(tree: DraftTree, node: int) -> list[int]:
    """Token ids of the children of ``node``, in the order of their index."""
    return [tree.token_ids[i] for i in range(node + 1, tree.num_nodes) if tree.parents[i] == node]


def _draft_law(tree: DraftTree, node: int) -> torch.Tensor | None:
    """q after ``node``, float64 [V]; None where children were not drawn, or there are none."""
    if tree.draft_probs is None or node not in tree.parents:
        return None
    if node not in tree.draft_probs:
        raise ValueError(f"node {node} has drawn children, but draft_probs lack it")
    return _normalised(tree.draft_probs[node].double())


def _decide(p: torch.Tensor, q: torch.Tensor | None, children: Sequence[int], coins: CoinSource, position: int) -> int:
    """The token at ``position``, of law p: a child's, or one from what its siblings left of p.

    p: float64 [V]; q: float64 [V] that the children were drawn from without replacement, None for one-hot.
    """
    for draw, token in enumerate(children):
        q_token = 0.0 if q is None else float(q[token])
        # A child outside q's support came when that was used up: it is no draw, and one-hot is exact for any token.
        ratio = float(p[token]) / (q_token or 1.0)
        if coins.flip(min(1.0, ratio), position, draw):
            return token
        p = _residual(p, token, q if q_token else None)
        q = None if q is None else _without(q, token)
    return coins.pick(p, position, len(children))


def _residual(p: torch.Tensor, token: int, q: torch.Tensor | None) -> torch.Tensor:
    """norm(max(p - q, 0)), q one-hot on ``token`` when None.

    With p == q nothing remains; the rejection that led here had probability 0, and p stands in (B1, J9).
    """
    rest = _zeroed(p, token) if q is None else (p - q.to(p.device)).clamp_(min=0.0)
    normalised = _normalised(rest)
    return p if normalised is None else normalised


def _without(q: torch.Tensor, token: int) -> torch.Tensor | None:
    """The law of the next sibling: q without ``token``, renormalised; None when that was all."""
    return _normalised(_zeroed(q, token))


def _zeroed(probs: torch.Tensor, token: int) -> torch.Tensor:
    probs = probs.clone()
    probs[token] = 0.0
    return probs


def _normalised(weights: torch.Tensor) -> torch.Tensor | None:
    """weights / sum; None without a finite sum above 0 (a drafter that computed NaN counts as one-hot)."""
    total = float(weights.sum())
    return weights / total if 0.0 < total < math.inf else None


def typical(v: Verification) -> Verdict:
    """Typical acceptance (C3): LOSSY, the text leaves the target's law wherever a draft is accepted.

    Token x is accepted after a node of law p iff p(x) > min(epsilon, delta * exp(-entropy(p))), entropy in nats. The
    longest accepted path wins, of equally long ones the likeliest, then the lowest node; one token is drawn from p at
    its end. A path that ends in a stop token needs none.
    """
    if v.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {v.max_new_tokens}")
    laws: dict[int, torch.Tensor] = {}

    def law(node: int) -> torch.Tensor:
        if node not in laws:
            laws[node] = v.target.probs(node)
        return laws[node]

    end = _typical_end(v, law)
    path = tuple(v.tree.path(end)[1:])
    if path and v.is_stop(v.tree.token_ids[end]):
        return Verdict(path[:-1], v.tree.token_ids[end], FinishReason.STOP)
    token = v.coins.pick(law(end), v.root_position + len(path) + 1, 0)
    if v.is_stop(token):
        return Verdict(path, token, FinishReason.STOP)
    return Verdict(path, token, FinishReason.LENGTH if len(path) + 1 >= v.max_new_tokens else None)


def _typical_end(v: Verification, law: Callable[[int], torch.Tensor]) -> int:
    """The last node of the accepted path that wins, 0 when nothing was accepted."""
    tree = v.tree
    log_likelihood = {0: 0.0}  # of the accepted nodes that can be descended into
    end, best = 0, (0, 0.0)
    for node in range(1, tree.num_nodes):
        parent, token = tree.parents[node], tree.token_ids[node]
        if parent not in log_likelihood or tree.depths[node] >= v.max_new_tokens:
            continue
        p = law(parent)
        chance = float(p[token])
        if chance <= _typical_threshold(p):
            continue
        score = log_likelihood[parent] + math.log(chance)
        if (tree.depths[node], score) > best:
            end, best = node, (tree.depths[node], score)
        if not v.is_stop(token):
            log_likelihood[node] = score
    return end


def _typical_threshold(p: torch.Tensor) -> float:
    entropy = float(torch.special.entr(p).sum())
    return min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))


@dataclass(frozen=True)
class AcceptanceRule:
    """A rule and what a deployment must know to choose it."""

    name: str
    lossless: bool  # the text keeps the target's law
    needs_chain: bool  # trees must not branch
    function: RuleFunction


RULES: Mapping[str, AcceptanceRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            AcceptanceRule("sample", lossless=True, needs_chain=False, function=sample),
            AcceptanceRule("rejection", lossless=True, needs_chain=True, function=rejection),
            AcceptanceRule("recursive", lossless=True, needs_chain=False, function=recursive),
            AcceptanceRule("typical", lossless=False, needs_chain=False, function=typical),
        )
    }
)
