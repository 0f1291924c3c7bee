"""Exactness by enumeration, with no sampling error (algorithms.md J1).

The law of the output of whole generations must equal the target's joint law to rounding. The rules of algorithms.md
section B other than the default are written here as oracles, apart from the product's; for each rule its known mutants
must fail the check that the rule passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest

from paceline.request import SamplingParams
from paceline.spec_decode.accept.verify import Verdict, walk
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.enumeration import (
    CUT,
    EXACT,
    PENALISED,
    Choose,
    Model,
    Probs,
    Round,
    Tokens,
    deviation,
    law,
    normalised,
    ranked,
)

# ---- the default rule: sample, then descend (B5c) ---------------------------------------------------------------

# (parent, rank of the token in q there); parent indexes the list, -1 is the root
SHAPES: dict[str, list[tuple[int, int]]] = {
    "plain": [],
    "chain1": [(-1, 0)],
    "chain3": [(-1, 0), (0, 0), (1, 0)],
    "wide": [(-1, 0), (-1, 1), (-1, 2)],
    "comb": [(-1, 0), (-1, 1), (0, 0), (0, 1), (2, 0), (2, 1)],
    "deep": [(-1, 1), (-1, 0), (1, 0), (2, 0), (2, 1), (0, 2)],
    "unlikely": [(-1, 3), (0, 3), (1, 3)],
}


def draft(model: Model, prefix: Tokens, shape: str) -> DraftTree:
    """A deterministic tree: its children are the ranks of q in their context, as in greedy top-k drafting (B7)."""
    paths: list[Tokens] = []
    pairs: list[tuple[int, int]] = []
    for parent, rank in SHAPES[shape]:
        path = paths[parent] if parent >= 0 else ()
        token = ranked(model.q(prefix + path))[rank % model.vocab_size]
        pairs.append((parent, token))
        paths.append((*path, token))
    return build_tree(prefix[-1] if prefix else 0, pairs, model.vocab_size, max_nodes=16, max_depth=8)


Law = Callable[[Model, Tokens, Tokens], Probs]  # (model, committed output, tokens of the node's path) -> its law
Walk = Callable[[DraftTree, Callable[[int], int], Callable[[int], bool], int], Verdict]


def own_law(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path)


def sample_then_descend(
    shape: str, stop: int | None = None, node_law: Law = own_law, walk_: Walk = walk, cut_at_stop: bool = True
) -> Round:
    """The rule, with the real ``walk``; the other arguments are where mutants go in."""

    def round_(model: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        tree = draft(model, prefix, shape)

        def sample(node: int) -> int:
            path = tuple(tree.token_ids[i] for i in tree.path(node)[1:])
            return choose(node_law(model, prefix, path))

        verdict = walk_(tree, sample, lambda token: cut_at_stop and token == stop, budget)
        return len(verdict.path), tuple(verdict.committed(tree))

    return round_


def check(build: Callable[[str, int | None], Round], shape: str, params: SamplingParams, stop: int | None) -> None:
    for seed in range(3):
        assert deviation(build(shape, stop), Model(4, seed, params), 3, stop) < EXACT
    assert deviation(build(shape, stop), Model(5, 9, params), 2, stop) < EXACT
    assert deviation(build(shape, stop), Model(3, 9, params), 4, stop) < EXACT


@pytest.mark.parametrize(
    ("params", "stop"), [(SamplingParams(), None), (PENALISED, 1), (CUT, 1)], ids=["plain", "penalised", "cut"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_sample_then_descend_is_exact(shape: str, params: SamplingParams, stop: int | None) -> None:
    check(sample_then_descend, shape, params, stop)


def law_of_the_parent(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path[:-1])


def law_without_the_path_in_penalties(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path, history=prefix)


def greedy_law(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    """A greedy verifier used at a temperature above 0 (J9)."""
    best = ranked(model.p(prefix + path))[0]
    return tuple(float(i == best) for i in range(model.vocab_size))


def walk_to_any_child(
    tree: DraftTree, sample: Callable[[int], int], is_stop: Callable[[int], bool], max_new_tokens: int
) -> Verdict:
    """Accepts the first child whatever was sampled."""
    path: list[int] = []
    node = 0
    while node in tree.parents and len(path) + 1 < max_new_tokens:
        if is_stop(token := sample(node)):
            return Verdict(tuple(path), token)
        node = tree.parents.index(node)
        path.append(node)
    return Verdict(tuple(path), sample(node))


@pytest.mark.parametrize("shape", ["chain3", "wide", "comb", "deep"])
@pytest.mark.parametrize(
    "mutant",
    [
        partial(sample_then_descend, node_law=law_of_the_parent),
        partial(sample_then_descend, node_law=law_without_the_path_in_penalties),
        partial(sample_then_descend, node_law=greedy_law),
        partial(sample_then_descend, walk_=walk_to_any_child),
        partial(sample_then_descend, cut_at_stop=False),
    ],
    ids=["law_of_the_parent", "penalties_ignore_the_path", "greedy", "any_child", "stop_does_not_cut"],
)
def test_mutants_of_the_default_rule_fail(mutant: Callable[[str, int | None], Round], shape: str) -> None:
    """The rule itself passes the same check above."""
    with pytest.raises(AssertionError):
        check(mutant, shape, PENALISED, 1)


# ---- the rejection rules of section B, as oracles ---------------------------------------------------------------


def residual(p: Probs, q: Probs) -> Probs:
    """norm(max(p - q, 0)); where the two are equal the rejection had probability 0, and p stands in (B1)."""
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return normalised(rest) if sum(rest) > 0 else p


def residual_without_renormalising(p: Probs, q: Probs) -> Probs:
    """A sampler that walks the cumulative sum falls off its end onto the last token."""
    rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return (*rest[:-1], 1.0 - math.fsum(rest[:-1]))


def one_hot(q: Probs) -> Probs:
    return tuple(float(i == ranked(q)[0]) for i in range(len(q)))


def top2(q: Probs) -> Probs:
    return normalised([x if i in ranked(q)[:2] else 0.0 for i, x in enumerate(q)])


def same(q: Probs) -> Probs:
    return q


def accepts(probability: float, choose: Choose) -> bool:
    return choose((min(1.0, probability), max(0.0, 1.0 - probability))) == 0


def rejection_chain(
    drawn_from: Callable[[Probs], Probs],
    claimed: Callable[[Probs], Probs],
    rest: Callable[[Probs, Probs], Probs] = residual,
    bonus: bool = True,
    depth: int = 2,
) -> Round:
    """Leviathan/Chen: drafts come from ``drawn_from(q)``, the ratio and the residual use ``claimed(q)`` (B1, B2)."""

    def round_(model: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        drafts: Tokens = ()
        for _ in range(depth):
            drafts += (choose(drawn_from(model.q(prefix + drafts))),)
        for i, token in enumerate(drafts):
            at = prefix + drafts[:i]
            p, q = model.p(at), claimed(model.q(at))
            if not accepts(p[token] / q[token], choose):
                return i, (*drafts[:i], choose(rest(p, q)))
        if not bonus:
            return depth, drafts
        return depth, (*drafts, choose(model.p(prefix + drafts)))

    return round_


def one_coin_siblings(children: Callable[[Probs], list[int]], threshold: float = 1.0) -> Round:
    """B5b at the root: one coin against the running sum over siblings; then a token from what was not offered."""

    def round_(model: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        p = model.p(prefix)
        offered = children(model.q(prefix))
        edges = [0.0]
        for token in offered:
            edges.append(min(1.0, edges[-1] + p[token] / threshold))
        coin = [b - a for a, b in itertools.pairwise(edges)]
        pick = choose((*coin, 1.0 - edges[-1]))
        if pick < len(offered):
            token = offered[pick]
            return 1, (token, choose(model.p((*prefix, token))))
        return 0, (choose(normalised([0.0 if i in offered else x for i, x in enumerate(p)])),)

    return round_


def sampled_siblings(replace: bool, shrink_q: bool, draws: int = 2) -> Round:
    """B6 at the root: ``draws`` children from q, tried in order against p and what p becomes after each rejection."""

    def round_(model: Model, prefix: Tokens, budget: int, choose: Choose) -> tuple[int, Tokens]:
        full = source = model.q(prefix)
        offered = []
        for _ in range(draws):
            offered.append(choose(source))
            if not replace:
                source = normalised([0.0 if i in offered else x for i, x in enumerate(full)])
        p, q = model.p(prefix), full
        for token in offered:
            if accepts(p[token] / q[token], choose):
                return 1, (token, choose(model.p((*prefix, token))))
            p = residual(p, q)
            if shrink_q:
                q = normalised([0.0 if i == token else x for i, x in enumerate(q)])
        return 0, (choose(p),)

    return round_


def best_two(q: Probs) -> list[int]:
    return ranked(q)[:2]


def best_twice(q: Probs) -> list[int]:
    return [ranked(q)[0]] * 2


def check_oracle(round_: Round) -> None:
    for seed in range(4):
        assert deviation(round_, Model(3, seed), 2) < EXACT


RULES: dict[str, Round] = {
    "B1": rejection_chain(same, same),
    "B1 truncated": rejection_chain(top2, top2),
    "B2": rejection_chain(one_hot, one_hot),
    "B5b": one_coin_siblings(best_two),
    "B6 with replacement": sampled_siblings(replace=True, shrink_q=False),
    "B6 without replacement": sampled_siblings(replace=False, shrink_q=True),
}
MUTANTS: dict[str, Round] = {
    "B2 greedy draft, softmax q": rejection_chain(one_hot, same),
    "B2 truncated draft, whole q": rejection_chain(top2, same),
    "residual not renormalised": rejection_chain(same, same, rest=residual_without_renormalising),
    "missing bonus": rejection_chain(same, same, bonus=False),
    "B5b threshold_acc 0.8": one_coin_siblings(best_two, threshold=0.8),
    "B5b duplicate siblings": one_coin_siblings(best_twice),
    "B6 without replacement, original q": sampled_siblings(replace=False, shrink_q=False),
}


@pytest.mark.parametrize("name", RULES)
def test_rejection_rules_are_exact(name: str) -> None:
    check_oracle(RULES[name])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_of_the_rejection_rules_fail(name: str) -> None:
    with pytest.raises(AssertionError):
        check_oracle(MUTANTS[name])
    assert max(deviation(MUTANTS[name], Model(3, seed), 2) for seed in range(4)) > 0.02  # far from rounding


def test_equal_distributions_leave_no_residual() -> None:
    """p == q makes the residual 0/0 (B1, J9); every draft is accepted and the law stays the target's."""
    assert residual((0.25, 0.75), (0.25, 0.75)) == (0.25, 0.75)
    assert deviation(rejection_chain(same, same), Model(3, 1, draft_is_target=True), 3) < EXACT


def test_duplicate_siblings_count_their_probability_twice() -> None:
    """The worked case of B5b: p = (.3, .7), children (0, 0): token 0 comes out at .6; our walk gives .3."""
    model = Model(2, 0, cache={((), ()): (0.3, 0.7), ((0,), (0,)): (0.5, 0.5), ((1,), (1,)): (0.5, 0.5)})

    def first_token(round_: Round) -> dict[Tokens, float]:
        return law(lambda choose: round_(model, (), 2, choose)[1][:1])

    assert first_token(one_coin_siblings(lambda q: [0, 0]))[0,] == pytest.approx(0.6)
    tree = DraftTree((0, 0, 0), (-1, 0, 0), (0, 1, 1))  # unmerged on purpose
    ours = law(lambda choose: tuple(walk(tree, lambda _: choose((0.3, 0.7)), lambda _: False, 2).committed(tree)[:1]))
    assert ours[0,] == pytest.approx(0.3, abs=EXACT)
