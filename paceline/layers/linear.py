"""Linear layers over weights packed once. A row's bits never depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from paceline.layers.build import load_kernels
from paceline.layers.shared_weights import kept


class Linear:
    """y = x W^T + b.

    weight: [out_features, in_features], bf16 or fp32; it is repacked and need not be kept by the caller.
    ``out_float32`` keeps the sums in float32 (LM heads: logits without bf16 ties). ``library``: the CPU kernels that it
    runs on; None elsewhere.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, out_float32: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.out_dtype = torch.float32 if out_float32 else weight.dtype
        self.bias = None if bias is None else bias.float().contiguous()
        self.library = load_kernels() if weight.device.type == "cpu" else None
        self._packed = self._pack(weight) if self.library is not None else weight

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        assert self.library is not None
        weight = weight.contiguous()
        is_bf16 = weight.dtype is torch.bfloat16
        elems = self.library.pl_packed_elems(self.out_features, self.in_features, int(is_bf16))
        pack = self.library.pl_pack_bf16 if is_bf16 else self.library.pl_pack_f32

        def fill(packed: torch.Tensor) -> None:
            pack(weight.data_ptr(), self.out_features, self.in_features, packed.data_ptr())

        return kept((elems,), weight.dtype, fill)

    @property
    def address(self) -> int:
        """Address of the packed weight, for a kernel that goes on with the product itself."""
        return self._packed.data_ptr()

    @property
    def bias_address(self) -> int | None:
        """Address of the bias, float32 [out_features]; None without one."""
        return None if self.bias is None else self.bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features] -> [T, out_features] of out_dtype."""
        if self.library is None:
            return linear_reference(x, self._packed, self.bias, self.out_dtype)
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=self.out_dtype)
        weight, bias = self.address, self.bias_address
        shape = (x.data_ptr(), rows, x.stride(0), weight, self.out_features, self.in_features, bias)
        if self.dtype is torch.bfloat16:
            self.library.pl_linear_bf16(*shape, out.data_ptr(), int(self.out_dtype is torch.float32))
        else:
            self.library.pl_linear_f32(*shape, out.data_ptr())
        return out


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """The same in torch; its bits depend on the number of rows."""
    if out_dtype is torch.float32 and weight.dtype is not torch.float32 and _keeps_sums(x.device):
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y + bias
    y = F.linear(x, weight)
    return (y if bias is None else y + bias.to(y.dtype)).to(out_dtype)


@cache
def _keeps_sums(device: torch.device) -> bool:
    """Whether a product of bf16 matrices can be had in float32, the sums as they were: torch has it on CUDA alone."""
    if device.type != "cuda":
        return False
    probe = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    try:
        return torch.mm(probe, probe, out_dtype=torch.float32).dtype is torch.float32
    except (TypeError, RuntimeError, NotImplementedError):
        return False


def fuse(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """One weight whose output is the outputs of ``weights`` side by side."""
    return torch.cat(list(weights), dim=0)
