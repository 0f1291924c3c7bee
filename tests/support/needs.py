"""What tests need of a machine, as marks. A run counts skip reasons that begin with "needs" (tests/conftest.py)."""

from __future__ import annotations

import pytest

from paceline.layers.build import load_kernels
from paceline.triton_support import has_triton

NO_KERNELS = "needs a C++ compiler"
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason=NO_KERNELS)
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
