"""What tests need of a machine, as marks. A run counts skip reasons that begin with "needs" (tests/conftest.py)."""

from __future__ import annotations

import os

import pytest

from paceline.huge_pages import collapses
from paceline.layers.build import NO_AMX, find_compiler, kernel_set, load_kernels
from paceline.triton_support import has_triton

NO_KERNELS = "needs a C++ compiler"
if load_kernels() is None and find_compiler() and os.environ.get("PACELINE_KERNELS") != "torch":
    # Not a machine that lacks something: no test may be left out for it.
    raise RuntimeError("there is a C++ compiler, and the CPU kernels cannot be built: see the warning above")
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason=NO_KERNELS)
# Flags of builds with fewer instructions than the host has, the portable one first. -O1 compiles in a third of the
# time.
LESSER_BUILDS = [
    ("-DPACELINE_GENERIC", "-O0"),
    *([(NO_AMX, "-O0")] if "amx" in kernel_set() else []),
]
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
needs_collapse = pytest.mark.skipif(
    not collapses(), reason="needs huge pages of memory files on demand, of Linux 6.1 on"
)
