"""Which products layers are made of on a GPU: the library's, or those whose bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.triton_support import has_triton, runs_triton

EXACT_BITS = "exact"
FLOAT8 = (8, 9)  # compute capability of the first GPUs that convert it
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


def by_kernels(device: torch.device) -> bool:
    """Whether a layer that is made now runs on the kernels of the CPU, or on what stands for them."""
    return device.type == "cpu" and not makes_exact(device)


def reads_codes(weight: torch.Tensor | QuantizedWeight) -> bool:
    """Whether a layer that is made now of ``weight``, without kernels of the CPU, multiplies codes as they lie: by the
    exact products whatever bits are asked for, since they take fewer bytes than floats. A GPU before sm_89 has no FP8,
    and makes floats of such codes; FP4 becomes floats on every GPU."""
    if not isinstance(weight, QuantizedWeight) or not runs_triton(weight.codes.device):
        return False
    if weight.float4:
        return False
    has_float8 = weight.codes.device.type != "cuda" or torch.cuda.get_device_capability(weight.codes.device) >= FLOAT8
    return has_float8 or weight.codes.dtype is not torch.float8_e4m3fn


def products_name(bits: str) -> str:
    """The products of a GPU, for the fingerprint: names that differ stand for unlike bits."""
    if bits != EXACT_BITS:
        return f"torch {torch.__version__}"
    import triton

    return f"torch {torch.__version__}/exact products {PRODUCTS}/triton {triton.__version__}"
