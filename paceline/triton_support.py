"""Whether Triton kernels can run on a device. Triton itself is imported late, by the modules that hold kernels."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec

import torch

EXACT = {"enable_fp_fusion": False}  # a launch's option: a product rounds before it is added, as on the host


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the package is installed."""
    return find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """On CUDA wherever Triton is installed; on the CPU in Triton's interpreter alone (TRITON_INTERPRET=1), which
    tests use and which is far slower than torch."""
    return has_triton() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's CUDA device the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (>= 1): Triton's blocks have such sizes."""
    return 1 << (n - 1).bit_length()
