"""What tests need of a machine, as marks. A run counts skip reasons that begin with "needs" (tests/conftest.py)."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from paceline.huge_pages import collapses
from paceline.layers import build
from paceline.layers.build import EXACT, NO_AMX, find_compiler, kernel_set, load_kernels
from paceline.triton_support import has_triton

NO_KERNELS = "needs a C++ compiler"
if load_kernels() is None and find_compiler() and os.environ.get("PACELINE_KERNELS") != "torch":
    # Not a machine that lacks something: no test may be left out for it.
    raise RuntimeError("there is a C++ compiler, and the CPU kernels cannot be built: see the warning above")
needs_kernels = pytest.mark.skipif(load_kernels() is None, reason=NO_KERNELS)
# Flags of builds with fewer instructions than the host has, the portable one first. -O0 compiles fastest by far.
LESSER_BUILDS = [
    ("-DPACELINE_GENERIC", "-O0"),
    *([(NO_AMX, "-O0")] if "amx" in kernel_set() else []),
]
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs triton")
needs_collapse = pytest.mark.skipif(
    not collapses(), reason="needs huge pages of memory files on demand, of Linux 6.1 on"
)


def lesser_kernels(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """One of LESSER_BUILDS, or with no flags the host's own."""
    if not flags:
        return load_kernels()
    with _in_two_pieces():
        return load_kernels(flags)


def other_kernels(*flags: str) -> Path:
    """Compiled with these flags too, not loaded, and kept like the host's own: the same sources are compiled once."""
    with _in_two_pieces():
        return build.compile_kernels(flags)


@contextmanager
def _in_two_pieces() -> Iterator[None]:
    """Sources that round after every operation are compiled together, and so are the others, for each header is read
    once a piece: half the time of file by file."""
    with tempfile.TemporaryDirectory() as folder:
        pieces = {EXACT: Path(folder, f"{EXACT}whole.cpp"), "": Path(folder, "whole.cpp")}
        for source in build._translation_units():
            piece = pieces[EXACT if source.name.startswith(EXACT) else ""]
            with piece.open("a") as file:
                file.write(f'#include "{source}"\n')
        with mock.patch.object(build, "_translation_units", return_value=list(pieces.values())):
            yield
