"""Goodness of fit: chi-square for counts, Kolmogorov-Smirnov for continuous numbers."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with ``degrees`` >= statistic), by Wilson and Hilferty's cube root (1931); exact for 1 and 2."""
    if degrees == 1:
        return math.erfc(math.sqrt(statistic / 2))
    if degrees == 2:
        return math.exp(-statistic / 2)
    spread = 2 / (9 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def chi_square(counts: Counts, probs: Floats) -> float:
    """p-value of ``counts`` against cell probabilities of the same shape.

    Cells that expect under 5 are pooled, and a pool that is still too thin joins the thinnest proper cell. A count
    where the probability is 0 gives 0.
    """
    counts, probs = counts.ravel(), probs.ravel()
    assert counts.shape == probs.shape
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5:
        thinnest = int(expected[:-1].argmin())
        observed[thinnest] += observed[-1]
        expected[thinnest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return chi_square_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def ks_uniform(values: Floats) -> float:
    """p-value of ``values`` as independent draws from U[0, 1), by Kolmogorov's limit law (n of hundreds or more)."""
    n = len(values)
    ordered = np.sort(values)
    above = (np.arange(1, n + 1) / n - ordered).max()
    below = (ordered - np.arange(n) / n).max()
    scaled = float(max(above, below)) * math.sqrt(n)
    if scaled < 0.2:  # the law's value is 1 to ten digits there, and its series slow
        return 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * math.fsum(terms)))
