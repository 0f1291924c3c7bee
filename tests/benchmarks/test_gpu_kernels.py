"""FlashInfer's kernels that are compiled without a GPU, against those that its wrappers load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu import kernels

PAGES, ALIKE, LATENT = "gen_batch_prefill_module", "_gen_batch_prefill_primary_module", "gen_batch_mla_module"


def generator(name: str) -> Callable[..., Any]:
    def made(family: str, *given: Any) -> Any:
        widths = "x".join(str(width) for width in given[4:6])
        return SimpleNamespace(name=f"{name} {family} {widths}")

    return made


@pytest.mark.parametrize("loads", [ALIKE, PAGES])
def test_what_is_compiled_is_what_is_loaded(
    loads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FlashInfer 0.7.2 loads the library for pages of equal strides, one before it the library for all. Mutants: that
    for all always; none for Hopper; ``--list`` compiles."""
    for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.env", "flashinfer.jit.attention"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    attention: Any = sys.modules["flashinfer.jit.attention"]
    attention.modules = SimpleNamespace(**{name: generator(name) for name in {PAGES, LATENT, loads}})
    assert kernels.main(["--list"]) == 0
    widths = ("64x64", "128x128")
    assert capsys.readouterr().out.splitlines() == [
        *(f"{loads} fa2 {width}" for width in widths),
        *(f"{PAGES} fa3 {width}" for width in widths),
        f"{LATENT} fa2 512x64",
    ]
