"""One rule on ties, whatever torch.topk does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.sampling.topk import argmax_lowest, stable_topk


def by_hand(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_equals_sorting_by_value_then_id(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    few_levels = st.integers(-2, 2).map(float) | st.just(float("-inf"))
    rows = data.draw(st.lists(st.lists(few_levels, min_size=width, max_size=width), min_size=1, max_size=4))
    k = data.draw(st.integers(1, width))
    assert stable_topk(torch.tensor(rows), k).tolist() == [by_hand(row, k) for row in rows]


def test_wide_rows_with_ties_at_the_boundary() -> None:
    values = torch.randn(3, 20_000, generator=torch.Generator().manual_seed(0))
    values[1] = (values[1] * 4).round()  # thousands of equals
    values[2] = 0.0
    for k in (2, 7, 300):
        assert stable_topk(values, k).tolist() == [by_hand(row, k) for row in values.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_argmax_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    values = torch.zeros(3, 50_000, dtype=dtype)
    values[0, [70, 30_000, 49_999]] = 2.0
    values[1, 49_999] = 1.0
    assert argmax_lowest(values).tolist() == [70, 49_999, 0]


def test_argmax_shows_a_nan() -> None:
    assert argmax_lowest(torch.tensor([[3.0, float("nan"), 9.0]])).tolist() == [1]


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range(k: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 3"):
        stable_topk(torch.zeros(1, 3), k)
