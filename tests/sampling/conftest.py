"""The chi-square test that the sampling tests share."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

torch.set_num_threads(1)

Counts = npt.NDArray[np.int64]
Probs = npt.NDArray[np.float64]


def tail(statistic: float, degrees: int) -> float:
    """P(chi-square with ``degrees`` >= statistic), by Wilson and Hilferty's cube root (1931); exact for 1 and 2."""
    if degrees == 1:
        return math.erfc(math.sqrt(statistic / 2))
    if degrees == 2:
        return math.exp(-statistic / 2)
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def p_value(counts: Counts, probs: Probs) -> float:
    """Goodness of fit of ``counts`` to ``probs``. Cells expecting under 5 are pooled; an impossible outcome gives 0."""
    counts, probs = counts.ravel(), probs.ravel()
    assert counts.shape == probs.shape
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5:  # the pool is still too thin: it joins the thinnest proper cell
        thinnest = int(expected[:-1].argmin())
        observed[thinnest] += observed[-1]
        expected[thinnest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


@pytest.fixture(scope="session")
def chi_square() -> Callable[[Counts, Probs], float]:
    """p-value of counts against cell probabilities, any shape."""
    assert tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)  # table values
    assert tail(18.307, 10) == pytest.approx(0.05, abs=1e-3)
    assert tail(149.449, 100) == pytest.approx(0.001, abs=1e-4)
    return p_value
