"""The product's acceptance rules, exact by enumeration (algorithms.md J1), and their known mutants, which are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from paceline.request import SamplingParams
from paceline.spec_decode.accept import acceptance
from paceline.spec_decode.accept.acceptance import RULES, Verification
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.enumerate_acceptance import (
    CHAINS,
    DRAWN,
    ONE_HOT,
    SHAPES,
    Drafting,
    ScriptedCoins,
    TableRows,
    best_next,
    draw_next,
    rounds,
)
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
)
from tests.support.enumeration import ranked as ranks

GREEDY = SamplingParams(temperature=0.0)
PARAMS = {"plain": SamplingParams(), "penalised": PENALISED, "cut": CUT}
LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
FITTING = [(rule, shape) for rule in RULES for shape in SHAPES if shape in CHAINS or not RULES[rule].needs_chain]
BIG = ("comb", "both", "chain3")  # drawn, their outcomes are many


def worst(round_: Round, params: SamplingParams, stop: int | None, sizes: Sequence[tuple[int, int]]) -> float:
    """Largest deviation over models of (vocabulary, tokens generated)."""
    return max(deviation(round_, Model(size, seed, params), length, stop) for seed, (size, length) in enumerate(sizes))


# ---- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("params", "stop"), [("plain", None), ("penalised", 1), ("cut", 1)])
@pytest.mark.parametrize(("rule", "shape"), [pair for pair in FITTING if pair[0] in LOSSLESS])
def test_deterministic_drafts(rule: str, shape: str, params: str, stop: int | None) -> None:
    sizes = [(3, 3), (4, 2), (5, 2)]
    assert worst(rounds(rule, ONE_HOT, shape, stop), PARAMS[params], stop, sizes) < EXACT


@pytest.mark.parametrize(
    ("rule", "shape", "params", "stop"),
    [
        (rule, shape, params, stop)
        for rule, shape in FITTING
        if rule in LOSSLESS
        for params, stop in (("plain", None), ("penalised", 1), ("cut", 1))
        if shape != "wide3" or params == "plain"  # its outcomes are the most, and wide2 has what parameters change
    ],
)
def test_drawn_drafts(rule: str, shape: str, params: str, stop: int | None) -> None:
    sizes = [(3, 2)] if shape in BIG or rule == "sample" else [(3, 3), (4, 2), (5, 2)]
    assert worst(rounds(rule, DRAWN, shape, stop), PARAMS[params], stop, sizes) < EXACT


def test_three_drawn_tokens_deep() -> None:
    assert deviation(rounds("rejection", DRAWN, "chain3", stop=2), Model(3, 5), 4, stop=2) < EXACT


def top2(q: Probs) -> Probs:
    return normalised([x if i in ranks(q)[:2] else 0.0 for i, x in enumerate(q)])


def drawn_again(law_: Probs, taken: Sequence[int], choose: Choose) -> int:
    """A draw with replacement."""
    return choose(law_)


@pytest.mark.parametrize("shape", ["chain2", "wide2", "wide3"])
@pytest.mark.parametrize(
    "drafting",
    [
        replace(DRAWN, source=top2, claimed=top2),  # wide3: the third sibling comes when q is used up
        replace(DRAWN, claims_q=False),  # drawn, but taken for fixed children: exact as well
        replace(ONE_HOT, claims_q=True, claimed=lambda q: tuple(float("nan") for _ in q)),  # a broken drafter
        replace(DRAWN, next_token=drawn_again),  # a duplicate is never accepted, the others are as if drawn without
    ],
    ids=["truncated q", "unclaimed", "nan", "duplicates"],
)
def test_other_drafts_that_keep_the_law(drafting: Drafting, shape: str) -> None:
    sizes = [(3, 2)] if shape == "wide3" else [(3, 2), (4, 2)]
    assert worst(rounds("recursive", drafting, shape), SamplingParams(), None, sizes) < EXACT


@pytest.mark.parametrize("shape", ["chain2", "wide2", "comb"])
def test_equal_distributions_leave_no_residual(shape: str) -> None:
    """p == q up to q's rounding: the 0/0 of B1 and J9."""
    for seed in range(3):
        assert deviation(rounds("recursive", DRAWN, shape), Model(3, seed, draft_is_target=True), 2) < EXACT
    assert acceptance._residual(half := torch.tensor([0.5, 0.5], dtype=torch.float64), 0, half).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("drafting", [ONE_HOT, DRAWN], ids=["one_hot", "drawn"])
@pytest.mark.parametrize(("rule", "shape"), FITTING)
def test_temperature_zero_gives_the_greedy_tokens(rule: str, shape: str, drafting: Drafting) -> None:
    sizes = [(3, 2), (4, 2)] if shape in BIG and drafting is DRAWN else [(3, 3), (4, 2)]
    assert worst(rounds(rule, drafting, shape, stop=1), GREEDY, 1, sizes) < EXACT


@pytest.mark.parametrize("drafting", [ONE_HOT, DRAWN], ids=["one_hot", "drawn"])
@pytest.mark.parametrize("shape", SHAPES)
def test_typical_acceptance_is_lossy(shape: str, drafting: Drafting) -> None:
    """The same check that the lossless rules pass; without drafts even this rule is plain decoding."""
    lost = worst(rounds("typical", drafting, shape), SamplingParams(), None, [(3, 2), (4, 2), (3, 2)])
    assert lost < EXACT if shape == "plain" else lost > 0.1
    assert not RULES["typical"].lossless


# ---- mutants ------------------------------------------------------------------------------------------------------


def without_bonus(v: Verification) -> Verdict:
    """Draws no bonus after a leaf: the leaf's own token stands in."""
    verdict = acceptance.rejection(v)
    if verdict.path and verdict.path[-1] == v.tree.num_nodes - 1:
        return replace(verdict, new_token=v.tree.token_ids[-1])
    return verdict


class LooseCoins(ScriptedCoins):
    """A threshold under 1 (B8): drafts are accepted more often than they should."""

    def flip(self, probability: float, position: int, draw: int) -> bool:
        return super().flip(min(1.0, probability / 0.8), position, draw)


def law_of_the_parent(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path[:-1])


def law_without_the_path_in_penalties(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    return model.p(prefix + path, history=prefix)


def greedy_law(model: Model, prefix: Tokens, path: Tokens) -> Probs:
    """A greedy verifier used at a temperature above 0 (J9)."""
    best = ranks(model.p(prefix + path))[0]
    return tuple(float(i == best) for i in range(model.vocab_size))


def likelier_of_two(law_: Probs, taken: Sequence[int], choose: Choose) -> int:
    """Two draws of which the less likely is pruned by its score (B6)."""
    first = choose(law_)
    second = draw_next(law_, [first], choose)
    return max(first, second, key=lambda token: law_[token])


@dataclass(frozen=True)
class Mutant:
    """One thing done wrongly, on a shape where it shows; ``patch`` replaces a function of the product."""

    shape: str
    build: Callable[..., Round]
    right: Callable[..., Round]
    patch: tuple[str, object] | None = None
    params: str = "plain"


def residual_without_renormalising(p: torch.Tensor, token: int, q: torch.Tensor | None) -> torch.Tensor:
    """A sampler that walks the cumulative sum falls off its end onto the last token."""
    rest = acceptance._zeroed(p, token) if q is None else (p - q).clamp(min=0.0)
    rest[-1] = 1.0 - rest[:-1].sum()
    return rest


UNRENORMALISED = ("_residual", residual_without_renormalising)
NO_RESIDUAL = ("_residual", lambda p, token, q: p)
WHOLE_Q = ("_without", lambda q, token: q)
recursive = partial(rounds, "recursive")
drawn = partial(recursive, DRAWN)
one_hot = partial(recursive, ONE_HOT)
MUTANTS = {
    "B2 greedy draft, softmax q": Mutant("chain2", partial(recursive, replace(DRAWN, next_token=best_next)), drawn),
    "B2 truncated draft, whole q": Mutant("chain2", partial(recursive, replace(DRAWN, source=top2)), drawn),
    "B7 greedy siblings, softmax q": Mutant("wide2", partial(recursive, replace(DRAWN, next_token=best_next)), drawn),
    "B6 without replacement, original q": Mutant("wide2", drawn, drawn, patch=WHOLE_Q),
    "B6 pruned by score": Mutant("chain1", partial(recursive, replace(DRAWN, next_token=likelier_of_two)), drawn),
    "B8 threshold 0.8, siblings": Mutant("wide2", partial(one_hot, coins_of=LooseCoins), one_hot),
    "B8 threshold 0.8, chain": Mutant("chain2", partial(drawn, coins_of=LooseCoins), drawn),
    "residual not renormalised": Mutant("chain2", drawn, drawn, patch=UNRENORMALISED),
    "residual not renormalised, one-hot": Mutant("wide2", one_hot, one_hot, patch=UNRENORMALISED),
    "no residual": Mutant("chain2", drawn, drawn, patch=NO_RESIDUAL),
    "rejected tokens stay": Mutant("wide2", one_hot, one_hot, patch=NO_RESIDUAL),
    "missing bonus": Mutant("chain1", partial(rounds, without_bonus, DRAWN), drawn),
    "law of the parent": Mutant("chain2", partial(drawn, node_law=law_of_the_parent), drawn),
    "greedy law": Mutant("chain2", partial(drawn, node_law=greedy_law), drawn),
    "penalties ignore the path": Mutant(
        "chain2", partial(drawn, node_law=law_without_the_path_in_penalties), drawn, params="penalised"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    sizes = [(3, 2)] * 4
    assert worst(mutant.right(mutant.shape), PARAMS[mutant.params], None, sizes) < EXACT
    if mutant.patch is not None:
        monkeypatch.setattr(acceptance, *mutant.patch)
    assert worst(mutant.build(mutant.shape), PARAMS[mutant.params], None, sizes) > 0.02  # far from rounding


def test_duplicate_siblings_are_not_counted_twice() -> None:
    """The worked case of B5b: p = (.3, .7), children (0, 0). One coin against a running sum would give .6."""
    model = Model(2, 0, cache={((), ()): (0.3, 0.7), ((0,), (0,)): (0.5, 0.5)})
    tree = DraftTree((0, 0, 0), (-1, 0, 0), (0, 1, 1))  # unmerged on purpose

    def first_token(choose: Choose) -> Tokens:
        rows = TableRows(model, (), tree, choose)
        verdict = acceptance.recursive(Verification(tree, rows, ScriptedCoins(choose), 0, lambda _: False, 2))
        return tuple(verdict.committed(tree)[:1])

    assert law(first_token)[0,] == pytest.approx(0.3, abs=EXACT)


# ---- refusals -----------------------------------------------------------------------------------------------------


def refused(rule: str, tree: DraftTree, max_new_tokens: int = 3) -> None:
    choose = partial(max, key=None)
    rows = TableRows(Model(3, 0), (), tree, choose)
    RULES[rule].function(Verification(tree, rows, ScriptedCoins(choose), 0, lambda _: False, max_new_tokens))


def test_rejection_refuses_a_tree_that_branches() -> None:
    with pytest.raises(ValueError, match="chains"):
        refused("rejection", DraftTree((0, 1, 2), (-1, 0, 0), (0, 1, 1)))


def test_drawn_children_without_their_law_are_refused() -> None:
    with pytest.raises(ValueError, match="node 0 has drawn children"):
        refused("recursive", DraftTree((0, 1), (-1, 0), (0, 1), draft_probs={}))


@pytest.mark.parametrize("rule", RULES)
def test_a_round_must_be_allowed_a_token(rule: str) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        refused(rule, DraftTree((0,), (-1,), (0,)), max_new_tokens=0)


def test_rules_know_their_names() -> None:
    assert [(r.name, r.lossless, r.needs_chain) for r in RULES.values()] == [
        ("sample", True, False),
        ("rejection", True, True),
        ("recursive", True, False),
        ("typical", False, False),
    ]
    assert all(name == rule.name for name, rule in RULES.items())
