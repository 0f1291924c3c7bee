"""One linear per attention head, over strided views: the absorbed projections of latent attention."""

from __future__ import annotations

import torch

from paceline.layers.bits import makes_exact
from paceline.layers.build import load_kernels
from paceline.layers.shared_weights import kept


class HeadsLinear:
    """out[t, h] = weight[h] x[t, h]. A row's bits do not depend on how many rows there are; on a GPU this holds for
    layers that are made within ``bits.layer_bits``.

    weight: [heads, out_features, in_features], bf16 or fp32; it is repacked and need not be kept by the caller.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.heads, self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._library = load_kernels() if weight.device.type == "cpu" else None
        self._exact = self._library is None and makes_exact(weight.device)
        if self._library is not None:
            self._packed = self._pack(weight)
        else:
            self._packed = weight.contiguous() if self._exact else weight

    def _pack(self, weight: torch.Tensor) -> torch.Tensor:
        assert self._library is not None
        is_bf16 = self.dtype is torch.bfloat16
        elems = self._library.pl_packed_elems(self.out_features, self.in_features, int(is_bf16))
        pack = self._library.pl_pack_bf16 if is_bf16 else self._library.pl_pack_f32

        def fill(packed: torch.Tensor) -> None:
            for one, target in zip(weight, packed, strict=True):
                one = one.contiguous()
                pack(one.data_ptr(), self.out_features, self.in_features, target.data_ptr())

        return kept((self.heads, elems), self.dtype, fill)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [T, heads, in_features]; fills out: [T, heads, out_features]. Elements lie together, rows and heads need
        not: both may be slices of wider rows."""
        if self._exact:
            from paceline.layers.exact_products import Matrices, heads_product

            heads_product(x, Matrices(self._packed), out)
            return
        if self._library is None:
            out.copy_(heads_linear_reference(x, self._packed))
            return
        run = self._library.pl_linear_heads_bf16 if self.dtype is torch.bfloat16 else self._library.pl_linear_heads_f32
        run(
            x.data_ptr(), x.stride(0), x.stride(1), x.shape[0], self.heads, self._packed.data_ptr(),
            self.out_features, self.in_features, out.data_ptr(), out.stride(0), out.stride(1),
        )  # fmt: skip


def heads_linear_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same in torch, [T, heads, out_features]; its bits depend on the number of rows."""
    return torch.einsum("thk,hnk->thn", x, weight)
