"""Which products layers are made of on a GPU: the library's, or those whose bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from paceline.errors import ConfigError
from paceline.triton_support import has_triton, runs_triton

EXACT_BITS = "exact"
PRODUCTS = 1  # version of what the exact products compute; another one gives other bits
_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextmanager
def layer_bits(bits: str, device: torch.device) -> Iterator[None]:
    """Layers that are made inside have these bits: ``fast`` or ``exact``, see EngineConfig.bits.

    Raises ConfigError for ``exact`` on a GPU without Triton.
    """
    wanted = bits == EXACT_BITS
    if wanted and device.type == "cuda" and not has_triton():
        raise ConfigError("bits", "exact bits on a GPU need the package triton: install it, or set bits to fast")
    token = _exact.set(wanted)
    try:
        yield
    finally:
        _exact.reset(token)


def makes_exact(device: torch.device) -> bool:
    """Whether a layer that is made now, and that has no kernels of the CPU, takes the exact products."""
    return _exact.get() and runs_triton(device)


def products_name(bits: str) -> str:
    """The products of a GPU, for the fingerprint: names that differ stand for unlike bits."""
    if bits != EXACT_BITS:
        return f"torch {torch.__version__}"
    import triton

    return f"torch {torch.__version__}/exact products {PRODUCTS}/triton {triton.__version__}"
