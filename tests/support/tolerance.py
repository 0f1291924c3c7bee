"""How far two tensors may be apart: the limits that ``torch.testing.assert_close`` takes."""

from __future__ import annotations

from typing import TypedDict


class Tolerance(TypedDict):
    """``rtol`` is a fraction of the expected value; ``atol`` is added to it."""

    rtol: float
    atol: float
