"""``target_probs`` is the law that ``sample_rows`` draws from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.probs import target_probs
from paceline.sampling.sampler import RowContext, sample_rows

ChiSquare = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float]
P_FAIL = 1e-4
DRAWS = 20_000
PROMPT, OUTPUT, PATH = (1, 2), (3, 3), (4, 1)


def logits_of(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.4, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.3},
        {"repetition_penalty": 1.6, "frequency_penalty": 0.8, "presence_penalty": -0.5, "top_p": 0.9},
        {"logit_bias": {0: 3.0, 5: -100.0}, "min_tokens": 5, "stop_token_ids": (2,)},
        {"logit_bias": {0: 1.0}, "min_tokens": 4, "stop_token_ids": (2,)},
    ],
    ids=["plain", "top_k", "min_p", "penalties", "bias", "long_enough"],
)
def test_draws_follow_it(params: dict[str, Any], chi_square: ChiSquare) -> None:
    logits = logits_of(10, 4)
    before = logits.clone()
    base = SamplingParams(**params)
    rows = [RowContext(replace(base, seed=seed), 9, PROMPT, OUTPUT, PATH) for seed in range(DRAWS)]
    probs = target_probs(logits, rows[0])
    assert probs.dtype == torch.float64
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-12)
    assert torch.equal(logits, before)
    counts = np.bincount(sample_rows(logits.expand(DRAWS, -1), rows), minlength=10)
    assert chi_square(counts, probs.numpy()) > P_FAIL


def test_without_the_path_the_draws_are_not_followed(chi_square: ChiSquare) -> None:
    """The check above has teeth: penalties that ignore the draft ancestors."""
    logits, base = logits_of(10, 4), SamplingParams(frequency_penalty=0.8)
    rows = [RowContext(replace(base, seed=seed), 9, PROMPT, OUTPUT, PATH) for seed in range(DRAWS)]
    counts = np.bincount(sample_rows(logits.expand(DRAWS, -1), rows), minlength=10)
    assert chi_square(counts, target_probs(logits, replace(rows[0], path_token_ids=())).numpy()) < P_FAIL


def test_greedy_is_one_hot_on_the_lowest_of_the_best() -> None:
    row = RowContext(SamplingParams(temperature=0.0, top_k=2), 9, (), (), ())
    assert target_probs(torch.tensor([1.0, 3.0, 3.0, 0.0]), row).tolist() == [0.0, 1.0, 0.0, 0.0]
    biased = replace(row, params=SamplingParams(temperature=0.0, logit_bias={3: 4.0}))
    assert target_probs(torch.tensor([1.0, 3.0, 3.0, 0.0]), biased).tolist() == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2])
def test_a_broken_forward_is_an_error(logits: list[float], temperature: float) -> None:
    row = RowContext(SamplingParams(temperature=temperature, seed=0), 9, (), (), ())
    for call in (lambda: target_probs(torch.tensor(logits), row), lambda: sample_rows(torch.tensor([logits]), [row])):
        with pytest.raises(FloatingPointError, match="position 9"):
            call()
