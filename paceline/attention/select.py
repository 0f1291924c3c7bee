"""Which attention backend a node runs."""

from __future__ import annotations

import logging

import torch

from paceline.attention.base import AttentionBackend
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)

FLASHINFER, TRITON, TORCH = "flashinfer", "triton", "torch"
SLOW = ", which is slow,"


def attention_for(
    device: torch.device,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    wanted: str = "auto",
    *,
    special: bool = False,
    longest: int = 0,
) -> AttentionBackend:
    """The backend of a device and geometry.

    wanted: ``flashinfer``, ``triton``, ``torch`` or ``auto``, which takes on CUDA the first of them that is installed.
    special: layers have sinks, or windows shorter than the ``longest`` context, which FlashInfer does not serve here.
    Raises ConfigError for FlashInfer and Triton where they cannot run, and for FlashInfer and a special model.
    """
    if wanted == TRITON:
        return _triton(device)
    if device.type != "cuda":
        if wanted == FLASHINFER:
            raise ConfigError("attention", "flashinfer runs on a GPU: set device to cuda, or attention to auto")
        if wanted == "auto" and device.type == "cpu" and CpuAttention.supports(num_heads, num_kv_heads, head_dim):
            return CpuAttention()
        return TorchAttention()
    if wanted == TORCH:
        return TorchAttention()
    if special and wanted == FLASHINFER:
        message = "flashinfer has no sliding windows and no sinks here, which this model needs: set attention to auto"
        raise ConfigError("attention", message)
    if special:
        return _without_flashinfer(device, "this model has sliding windows or sinks")
    from paceline.attention.flashinfer import FlashInferAttention  # it is nowhere but on GPUs

    try:
        return FlashInferAttention(device, head_dim, longest=longest)
    except ConfigError as missing:
        if wanted == FLASHINFER:
            raise
        return _without_flashinfer(device, str(missing))


def tell_what_serves(attention: AttentionBackend, layout: KvLayout, num_heads: int) -> None:
    """Say which backend computes which forwards over a pool of ``layout``."""
    left: dict[str, list[str]] = {}
    for forward, other in attention.left_to(layout, num_heads).items():
        left.setdefault(other, []).append(forward)
    log.info("attention: %s", attention.kernels)
    for other, forwards in left.items():
        level = logging.WARNING if other == TORCH else logging.INFO
        log.log(level, "attention: %s%s computes %s", other, SLOW if other == TORCH else "", "; ".join(forwards))


def _triton(device: torch.device) -> AttentionBackend:
    if not runs_triton(device):
        raise ConfigError("attention", "triton runs on a GPU where it is installed: set attention to auto")
    from paceline.attention.triton_paged import TritonAttention

    return TritonAttention()


def _without_flashinfer(device: torch.device, reason: str) -> AttentionBackend:
    if runs_triton(device):
        log.info("%s: attention runs on Triton kernels", reason)
        return _triton(device)
    log.warning("%s, and triton is not installed: torch's attention runs, which is slow", reason)
    return TorchAttention()
