"""Linear layers over weights packed once. A row's bits never depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from paceline.layers.bits import makes_exact, reads_codes
from paceline.layers.build import load_kernels
from paceline.layers.packed import PackedMatrix
from paceline.layers.quantized import LinearWeight, QuantizedWeight, fuse
from paceline.layers.quantized_reference import integer_linear_reference
from paceline.parallel.slabs import MOST_SLABS, slabs_of, tree_sum
from paceline.triton_support import runs_triton

__all__ = ["Linear", "fuse", "linear_reference"]
_Product = Callable[[torch.Tensor, torch.dtype], torch.Tensor]  # of rows, in a dtype


class Linear:
    """y = x W^T + b.

    weight: [out_features, in_features], bf16, fp32 or quantised; it is repacked and need not be kept by the caller.
    ``out_float32`` keeps the sums in float32 (LM heads: logits without bf16 ties). ``slabs``: runs of the inner
    dimension, each a float32 sum of its own; ``slabs.tree_sum`` adds them, and the bias comes after the tree. A dense
    weight on a CPU without kernels has sums of its own whatever it says. ``library``: the CPU kernels that it runs on;
    None elsewhere. On a GPU a row's bits depend on the others unless it is made within ``bits.layer_bits``.
    """

    whole = True  # whether its sums are the product's, not a rank's part of them

    def __init__(
        self, weight: LinearWeight, bias: torch.Tensor | None = None, out_float32: bool = False, slabs: int = 1
    ) -> None:
        """Raises ValueError for a quantised weight that the CPU's kernels cannot hold, and for slabs that are more than
        8 or not each a multiple of 32 elements and of whole groups."""
        self.out_features, self.in_features = weight.shape
        if not 1 <= slabs <= MOST_SLABS or slabs_of(self.in_features, slabs, group_of(weight)) != slabs:
            raise ValueError(
                f"{slabs} slabs of {self.in_features} elements: 1 to {MOST_SLABS}, of a multiple of 32 each, and of "
                f"whole groups of {group_of(weight)}"
            )
        self.slabs = slabs
        self.out_float32 = out_float32
        self.bias = None if bias is None else bias.float().contiguous()
        self.library = load_kernels() if device_of(weight).type == "cpu" else None
        self._quantised: QuantizedWeight | None = None
        self._exact = self._exact_product(weight) if self.library is None else None
        if self._exact is not None:
            return
        if self.library is not None:
            self._matrix = PackedMatrix(self.library, weight, self.bias, self.slabs)
            self._packed = self._matrix.packed
        elif isinstance(weight, QuantizedWeight):
            self._packed, self._quantised = weight.codes, weight
        else:
            self._packed = weight

    def _exact_product(self, weight: LinearWeight) -> _Product | None:
        """The product by the exact kernels, where layers are made for them, and of codes on any GPU."""
        if not makes_exact(device_of(weight)) and not reads_codes(weight):
            return None
        from paceline.layers.exact_products import Matrices, product

        matrices = Matrices.of(weight)
        return lambda x, out_dtype: product(x, matrices, self.bias, out_dtype, self.slabs)

    @property
    def address(self) -> int:
        """Address of the packed weight's ``Matrix``, for a kernel that goes on with the product itself."""
        return self._matrix.address

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, in_features], in the dtype of a dense weight -> [T, out_features] in x's dtype, or float32."""
        out_dtype = torch.float32 if self.out_float32 else x.dtype
        if self._exact is not None:
            return self._exact(x, out_dtype)
        if self.library is None:
            return self._without_kernels(x, out_dtype)
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty(rows, self.out_features, dtype=out_dtype)
        run = self.library.pl_linear_bf16 if x.dtype is torch.bfloat16 else self.library.pl_linear_f32
        run(self.address, x.data_ptr(), rows, x.stride(0), out.data_ptr(), int(self.out_float32))
        return out

    def _without_kernels(self, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        if (weight := self._quantised) is not None:
            if weight.int8_activations and x.device.type == "cpu":
                return integer_linear_reference(x, weight, self.bias, out_dtype, self.slabs)
            self._packed, self._quantised = weight.dequantised().to(x.dtype), None
        slabs = 1 if x.device.type == "cpu" else self.slabs  # there torch's bits depend on the batch as it is
        return linear_reference(x, self._packed, self.bias, out_dtype, slabs)


def group_of(weight: LinearWeight) -> int:
    """Elements of a row that stay together where a product is cut, see parallel.slabs.slabs_of."""
    return weight.kept_together if isinstance(weight, QuantizedWeight) else 1


def device_of(weight: LinearWeight) -> torch.device:
    """Where a weight lies."""
    return weight.codes.device if isinstance(weight, QuantizedWeight) else weight.device


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, slabs: int = 1
) -> torch.Tensor:
    """The same in torch; its bits depend on the number of rows."""
    if slabs > 1:
        return add_slabs(slab_sums(x, weight, slabs), bias, out_dtype)
    if out_dtype is torch.float32 and weight.dtype is not torch.float32 and _keeps_sums(x.device):
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return y if bias is None else y + bias
    y = F.linear(x, weight)
    return (y if bias is None else y + bias.to(y.dtype)).to(out_dtype)


def slab_sums(x: torch.Tensor, weight: torch.Tensor, slabs: int) -> torch.Tensor:
    """The sum of each slab, float32 [slabs, T, out_features]."""
    if x.device.type == "cpu":
        parts = zip(x.chunk(slabs, dim=1), weight.chunk(slabs, dim=1), strict=True)
        return torch.stack([F.linear(rows.float(), run.float()) for rows, run in parts])
    width = weight.shape[1] // slabs
    rows = x.reshape(-1, slabs, width).transpose(0, 1)  # [slabs, T, width]
    runs = weight.reshape(-1, slabs, width).permute(1, 2, 0)  # [slabs, width, out_features]
    if weight.dtype is not torch.float32 and _keeps_sums(x.device):
        return torch.bmm(rows, runs, out_dtype=torch.float32)
    return torch.bmm(rows.float(), runs.float())


def add_slabs(slabs: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """slabs: see ``slab_sums``; bias: float32 [out_features] -> [T, out_features]. One launch where Triton runs."""
    if runs_triton(slabs.device):
        from paceline.layers import ops_triton

        return ops_triton.add_slabs(slabs.contiguous(), bias, out_dtype)
    y = tree_sum(slabs.unbind())
    return (y if bias is None else y + bias).to(out_dtype)


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
