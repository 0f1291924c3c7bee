"""Which of FlashInfer's kernels serves a batch, if any."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from paceline.attention.flashinfer_kernels import (
    DecodeKernel,
    Geometry,
    Kernel,
    LatentKernel,
    LongPrefillKernel,
    PrefillKernel,
    StaticBuffers,
)
from paceline.attention.paged import PagedKind
from paceline.kvcache.layout import KvLayer, LayerKind

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
LONG_ROWS = 64  # of a request, on average: from there on Hopper's kernels, whose tiles are of 128 rows, pay
HOPPER = 9  # major compute capability of the GPUs that have them
MakeKernel = Callable[[ModuleType, torch.Tensor, StaticBuffers | None], Kernel]


def has_kernel(geometry: Geometry, kind: PagedKind) -> bool:
    """Whether FlashInfer serves it. MLA: whole tiles of heads (its causal bound is wrong otherwise), and no masks."""
    if geometry.dtype not in DTYPES:
        return False
    if geometry.value_dim == 0:
        return geometry.head_dim in HEAD_DIMS
    rope_dim = geometry.head_dim - geometry.value_dim
    fits = geometry.value_dim % 128 == 0 and rope_dim % 64 == 0 and 128 % geometry.num_heads == 0
    return fits and kind is not PagedKind.MASKED


def is_hopper(device: torch.device) -> bool:
    """Whether the device is of the generation that FlashInfer's ``fa3`` kernels are made for."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


def kernel_for(geometry: Geometry, kind: PagedKind, rows_each: float = 0.0) -> MakeKernel:
    """The wrapper for a batch of ``kind``. rows_each: of a request on average, where Hopper's kernels may be taken."""
    if geometry.value_dim:
        return LatentKernel
    if kind is PagedKind.CAUSAL and rows_each >= LONG_ROWS:
        return LongPrefillKernel
    return DecodeKernel if kind is PagedKind.DECODE else PrefillKernel


def described(geometry: Geometry, kind: PagedKind) -> str:
    """A forward in words."""
    layers = f"latents of {geometry.value_dim}" if geometry.value_dim else f"heads of {geometry.head_dim}"
    return f"{kind} rows over {layers} in {str(geometry.dtype).removeprefix('torch.')}"


def geometry_of_layer(layer: KvLayer, dtype: torch.dtype, num_heads: int) -> Geometry:
    """What `has_kernel` looks at, for a layer of a pool. Latents are taken for what their widths allow."""
    value_dim = layer.head_dim // 128 * 128 if layer.kind is LayerKind.MLA else 0
    return Geometry(num_heads, layer.num_kv_heads, layer.head_dim, value_dim, 1, 1.0, dtype)
