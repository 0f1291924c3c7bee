"""Which attention backend a node runs."""

from __future__ import annotations

import logging

import torch

from paceline.attention.base import AttentionBackend
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.errors import ConfigError

log = logging.getLogger(__name__)

FLASHINFER, TORCH = "flashinfer", "torch"


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

    wanted: ``auto`` (on CUDA FlashInfer, where it is installed), ``flashinfer`` or ``torch``. special: layers have
    sinks, or windows shorter than the ``longest`` context, which run on torch's reference on a GPU. Raises ConfigError
    for FlashInfer without a GPU, where it is not installed, and for a special model.
    """
    if device.type != "cuda":
        if wanted == FLASHINFER:
            raise ConfigError("attention", "flashinfer runs on a GPU: set device to cuda, or attention to auto")
        if wanted == "auto" and device.type == "cpu" and CpuAttention.supports(num_heads, num_kv_heads, head_dim):
            return CpuAttention()
        return TorchAttention()
    if special and wanted == FLASHINFER:
        message = "flashinfer has no sliding windows and no sinks here, which this model needs: set attention to torch"
        raise ConfigError("attention", message)
    if special:
        log.warning("this model has sliding windows or sinks: on a GPU torch's attention runs, which is slow")
    if special or wanted == TORCH:
        return TorchAttention()
    from paceline.attention.flashinfer import FlashInferAttention  # it is nowhere but on GPUs

    try:
        return FlashInferAttention(device, head_dim, longest=longest)
    except ConfigError as missing:
        if wanted == FLASHINFER:
            raise
        log.warning("%s; the torch backend runs instead, which is slow", missing)
        return TorchAttention()
