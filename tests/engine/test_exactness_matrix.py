"""Token equality on the real model, for every drafter: K of 0, 1, 3, 8, temperature 0 and 1, chain, static and dynamic
trees mixed in one batch, draft lengths fixed and adaptive, bf16 and fp32; and for drafters that mean harm.

The bits of every logit behind a token are compared, too: our kernels are row-invariant in both dtypes. The
disaggregated half is tests/e2e/test_disaggregated_matrix.py. Tests of a dtype stand together: one target is loaded at a
time, and that half leaves one of fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.adversaries import KINDS, Adversary
from tests.support.exactness_matrix import (
    CASES,
    Case,
    Cell,
    Matrix,
    chain_cross,
    full_cross,
    half_cross,
    matrix,
    over_budget,
    unload,
)
from tests.support.needs import needs_kernels
from tests.support.real_weights import Weights

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(600)]

# These have half of the cells; another drafter of their kind has all.
LIKE_ANOTHER = ("suffix", "trie", "eagle", "eagle3, greedy drafts", "mtp")
ADAPT = ("ngram", "eagle3", "mtp x3", "draft model", "auto", "several")  # a length is cut alike for drafters of a kind
FP32 = (  # one of each kind of state; the most of it, of three modules, is handed over in test_disaggregated_matrix.py
    ("eagle3", "window", 0),
    ("draft model", "goodput", 0),
    ("medusa", "window", 1),
)


@pytest.fixture(scope="session", autouse=True)
def unloaded_at_the_end() -> Iterator[None]:
    yield
    unload()


@pytest.fixture(scope="module")
def weights(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(smollm2_folder, tmp_path_factory.getbasetemp() / "matrix_weights")


@pytest.fixture
def bf16(smollm2_folder: Path) -> Matrix:
    return matrix(smollm2_folder, "bf16")


@pytest.fixture
def fp32(smollm2_folder: Path) -> Matrix:
    return matrix(smollm2_folder, "fp32")


def faults(target: Matrix, weights: Weights, case: Case, cells: list[Cell], **options: object) -> list[str]:
    """What is wrong: answers that are not the plain ones, drafts beyond what was asked for, and where lengths are fixed
    a drafter that is never right or never wrong, which would show nothing."""
    answers, tally = target.together(target.runner(target.config_of(case, weights, **options)), cells)
    found = [f"{cell} differs from plain" for cell in target.differing(cells, answers)]
    found += [f"{cell} drafts what it did not ask for" for cell in over_budget(cells, answers, named=bool(case.named))]
    wanted = {"drafted"} if case.drafter != "none" else set()
    if case.right_sometimes and options["adaptive"] == "off":
        wanted |= {"accepted", "refused"}
    return found + [f"no draft token is {word}" for word in sorted(wanted) if getattr(tally, word) == 0]


def adversary(target: Matrix, kind: str) -> Adversary:
    """It knows what the target will say."""
    answers = {(target.prompts[p], t): plain.token_ids for (p, t), plain in target.plain.items()}
    return Adversary(kind, answers, target.first.vocab_size)


@pytest.mark.parametrize(("name", "adaptive", "parity"), FP32)
def test_fp32(name: str, adaptive: str, parity: int, fp32: Matrix, weights: Weights) -> None:
    """What every drafter does with every kind of length is seen in bf16."""
    cells = half_cross(CASES[name], parity, max_tokens=12)
    assert faults(fp32, weights, CASES[name], cells, tree="dynamic", adaptive=adaptive) == []


def test_right_drafts_behind_wrong_ones_in_fp32(fp32: Matrix, weights: Weights) -> None:
    cells = half_cross(CASES["none"], parity=1, max_tokens=24)
    runner = fp32.runner(fp32.config_of(CASES["none"], weights, tree="dynamic", tree_nodes=16))
    runner.drafter = adversary(fp32, "right behind wrong")
    answers, tally = fp32.together(runner, cells)
    assert fp32.differing(cells, answers) == []
    assert tally.off_spine > 0


@pytest.mark.parametrize("name", CASES)
def test_bf16_fixed_lengths(name: str, bf16: Matrix, weights: Weights) -> None:
    half = name in LIKE_ANOTHER
    cells = half_cross(CASES[name], parity=1, max_tokens=12) if half else full_cross(CASES[name], max_tokens=12)
    assert faults(bf16, weights, CASES[name], cells, tree="dynamic", adaptive="off") == []


@pytest.mark.parametrize("name", ADAPT)
def test_bf16_adaptive_lengths(name: str, bf16: Matrix, weights: Weights) -> None:
    cells = half_cross(CASES[name], parity=0, max_tokens=12)
    assert faults(bf16, weights, CASES[name], cells, tree="dynamic", adaptive="window") == []


@pytest.mark.parametrize("name", ADAPT)
def test_bf16_adaptive_chains(name: str, bf16: Matrix, weights: Weights) -> None:
    """A deployment with no room for trees."""
    cells = chain_cross(CASES[name], max_tokens=12)
    assert faults(bf16, weights, CASES[name], cells, tree="chain", adaptive="goodput", page_size=16) == []


@pytest.mark.parametrize("kind", KINDS)
def test_adversarial_drafts_change_nothing(kind: str, bf16: Matrix, weights: Weights) -> None:
    cells = half_cross(CASES["none"], parity=0, max_tokens=16)
    runner = bf16.runner(bf16.config_of(CASES["none"], weights, tree="dynamic", tree_nodes=16))
    runner.drafter = adversary(bf16, kind)
    answers, tally = bf16.together(runner, cells)
    assert bf16.differing(cells, answers) == []
    assert all(a.stats.draft_tokens == 0 for c, a in zip(cells, answers, strict=True) if c.num_draft_tokens == 0)
    assert all(len(a.stats.drafted_per_position) <= c.num_draft_tokens for c, a in zip(cells, answers, strict=True))
    assert (tally.drafted == 0) == (kind == "empty")
    assert (tally.accepted == 0) == (kind in ("always wrong", "random", "empty"))
    if kind == "right behind wrong":
        assert tally.off_spine > len(cells)
        assert max(max(a.outcome.accepted_per_round, default=0) for a in answers) == 8


def test_the_matrix_is_whole() -> None:
    """Every K, tree and temperature occurs together in one batch, and in the two halves of one."""
    case = CASES["ngram"]

    def combinations(cells: list[Cell]) -> set[tuple[int, str, float]]:
        return {(cell.num_draft_tokens, cell.tree, cell.temperature) for cell in cells}

    whole = combinations(full_cross(case, 16))
    assert len(whole) == 3 * 3 * 2 + 2
    assert combinations(half_cross(case, 0, 16)) | combinations(half_cross(case, 1, 16)) == whole
    assert {cell.prompt for cell in half_cross(case, 0, 16)} == {"copy", "list", "planets"}
    assert len({cell.name for cell in full_cross(case, 16)}) == len(whole)


def test_the_plain_answers_are_worth_comparing(bf16: Matrix) -> None:
    """One prompt goes on copying, an answer ends by itself, and sampling differs from the best tokens."""
    plain = bf16.plain
    assert min(len(answer.token_ids) for answer in plain.values()) < 24
    assert all(plain[prompt, 0.0].token_ids != plain[prompt, 1.0].token_ids for prompt in ("list", "planets"))
