"""The law of the real sampler, by Monte Carlo over seeds (algorithms.md J2). Seeds are fixed: a pass stays a pass.

A right sampler fails a check with probability P_FAIL. The wrong ones below fail it by p-values under 1e-8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.params import process
from paceline.sampling.sampler import RowContext, perturbed_topk, sample_rows

ChiSquare = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float]
P_FAIL = 1e-4
CAUGHT = 1e-8
DRAWS = 50_000
POSITIONS = range(100)
EVEN, ODD = range(0, 200, 2), range(1, 200, 2)  # position pairs (0, 1), (2, 3), ...
CASES: list[tuple[int, float, dict[str, Any]]] = [  # (vocabulary, temperature, cut)
    (8, 0.3, {}),
    (16, 0.7, {}),
    (16, 1.0, {}),
    (8, 1.5, {}),
    (8, 1.5, {"top_k": 4}),
    (16, 0.7, {"top_p": 0.85}),
    (16, 1.0, {"top_k": 10, "top_p": 0.98, "min_p": 0.05}),  # min_p cuts most
]


def logits_of(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1.5


def draw(logits: torch.Tensor, params: SamplingParams, positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """DRAWS tokens: five hundred seeds at every one of a hundred positions."""
    seeded = [replace(params, seed=seed) for seed in range(DRAWS // len(positions))]
    rows = [RowContext(p, position, (), (), ()) for p in seeded for position in positions]
    return np.array(sample_rows(logits.expand(len(rows), -1), rows))


@pytest.mark.parametrize(("size", "temperature", "cut"), CASES)
def test_draws_follow_the_processed_distribution(
    size: int, temperature: float, cut: dict[str, Any], chi_square: ChiSquare
) -> None:
    params = SamplingParams(temperature=temperature, **cut)
    logits = logits_of(size, seed=size)
    counts = np.bincount(draw(logits, params, POSITIONS), minlength=size)
    assert chi_square(counts, process(logits, params).exp().numpy()) > P_FAIL


def test_the_wide_path_follows_its_distribution(chi_square: ChiSquare) -> None:
    """8192 tokens, a few of them likely: the pruned race."""
    logits = torch.full((8192,), -6.0)
    logits[::1024] = torch.linspace(0, 3, 8)
    rows = [RowContext(SamplingParams(seed=seed), 3, (), (), ()) for seed in range(10_000)]
    counts = np.bincount(sample_rows(logits.expand(len(rows), -1), rows), minlength=8192)
    assert chi_square(counts, process(logits, SamplingParams()).exp().numpy()) > P_FAIL


def test_two_positions_are_jointly_right(chi_square: ChiSquare) -> None:
    """64 joint cells of neighbouring positions under one seed."""
    first, second = logits_of(8, 1), logits_of(8, 2)
    params = SamplingParams(temperature=0.9)
    joint = 8 * draw(first, params, EVEN) + draw(second, params, ODD)
    probs = np.outer(process(first, params).exp().numpy(), process(second, params).exp().numpy())
    assert chi_square(np.bincount(joint, minlength=64), probs) > P_FAIL


def test_noise_that_ignores_the_position_is_caught(chi_square: ChiSquare) -> None:
    """The mutant of the test above: each position alone is right, the pair is not."""
    first, second = logits_of(8, 1), logits_of(8, 2)
    params = SamplingParams(temperature=0.9)
    joint = 8 * draw(first, params, EVEN) + draw(second, params, EVEN)
    probs = np.outer(process(first, params).exp().numpy(), process(second, params).exp().numpy())
    assert chi_square(np.bincount(joint, minlength=64), probs) < CAUGHT


@pytest.mark.parametrize("wrong", [{"temperature": 1.05}, {"top_k": 9}, {"top_p": 0.97}, {"temperature": 0.0}])
def test_slightly_wrong_distributions_are_caught(wrong: dict[str, Any], chi_square: ChiSquare) -> None:
    """The chi-square test has teeth; temperature 0 is the greedy verifier used at temperature 1 (J9)."""
    logits = logits_of(10, seed=16)
    params = SamplingParams()
    counts = np.bincount(draw(logits, replace(params, **wrong), POSITIONS), minlength=10)
    assert chi_square(counts, process(logits, params).exp().numpy()) < CAUGHT


def test_coupled_proposals_are_draws_without_replacement(chi_square: ChiSquare) -> None:
    """First and second of the race: q_i and then q_j / (1 - q_i)."""
    size, draws = 6, 60_000
    logits = logits_of(size, seed=9)
    params = [SamplingParams(temperature=0.8, seed=seed) for seed in range(draws)]
    ids, _ = perturbed_topk(logits.expand(draws, -1), params, [4] * draws, 2)
    q = torch.softmax(logits.double() / 0.8, dim=0).numpy()
    law = np.outer(q, q) / (1 - q)[:, None]
    np.fill_diagonal(law, 0.0)
    counts = np.bincount((ids[:, 0] * size + ids[:, 1]).numpy(), minlength=size * size)
    assert chi_square(counts, law) > P_FAIL
