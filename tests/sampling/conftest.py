"""The chi-square test that the sampling tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.goodness_of_fit import Counts, Floats, chi_square_tail
from tests.support.goodness_of_fit import chi_square as p_value

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def chi_square() -> Callable[[Counts, Floats], float]:
    """p-value of counts against cell probabilities, any shape."""
    assert chi_square_tail(3.841, 1) == pytest.approx(0.05, abs=1e-4)  # table values
    assert chi_square_tail(18.307, 10) == pytest.approx(0.05, abs=1e-3)
    assert chi_square_tail(149.449, 100) == pytest.approx(0.001, abs=1e-4)
    return p_value
