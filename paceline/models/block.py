"""What decoder layers of the Llama family and the layers of draft heads share: attention over the paged pool, then a
SwiGLU MLP.

Over the CPU's kernels each part is one call, so that a step of a small model is not spent between calls; elsewhere its
steps run one by one. Both give the same bits.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from paceline.attention.base import ForwardBatch
from paceline.attention.cpu import CpuAttention, RowPlan
from paceline.kvcache.pool import KvPool
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm, rms_norm, rope_write, silu_mul
from paceline.models.base import ForwardContext

_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}


class BlockShape(Protocol):
    """Geometry of a block; sizes in elements."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block. q, k and v are fused, and so are gate and up."""

    qkv: Linear
    o: Linear
    q_norm: torch.Tensor | None  # [head_dim], of each head of q
    k_norm: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden_size], before the MLP
    gate_up: Linear
    down: Linear


class _CBlock(ctypes.Structure):
    """``Block`` of kernels/block.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("width", "hidden", "heads", "kv_heads", "dim", "inter")),
        *((name, ctypes.c_void_p) for name in ("qkv", "o", "gate_up", "down")),  # of Linear.address
        *((name, ctypes.c_void_p) for name in ("q_norm", "k_norm", "post_norm")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("window", ctypes.c_int64),
    ]


class BlockCalls:
    """The kernels' calls for one block."""

    def __init__(self, block: Block, library: ctypes.CDLL) -> None:
        self._library, self._suffix = library, _SUFFIX[block.post_norm.dtype]
        shape, hidden, inter = block.shape, block.o_proj.out_features, block.down_proj.in_features
        linears = (block.qkv_proj, block.o_proj, block.gate_up_proj, block.down_proj)
        norms = (block.q_norm, block.k_norm, block.post_norm)
        self._block = _CBlock(
            block.qkv_proj.in_features, hidden, shape.num_heads, shape.num_kv_heads, shape.head_dim, inter,
            *(linear.address for linear in linears),
            *(None if norm is None else norm.data_ptr() for norm in norms), shape.rms_norm_eps, block.scale,
            block.window,
        )  # fmt: skip
        self.address = ctypes.addressof(self._block)
        # Elements a row.
        self.q_dim = shape.num_heads * shape.head_dim
        self.write_scratch = block.qkv_proj.out_features
        self.finish_scratch = self.q_dim + 2 * hidden + 3 * inter
        self.layer_scratch = hidden + self.q_dim + max(self.write_scratch, self.finish_scratch)

    def call(self, name: str, kv: KvPool) -> Any:  # a ctypes function
        """``write``, ``finish`` or ``layers`` of kernels/block.cpp, over a pool like ``kv``."""
        coded = "kv8_" if kv.layout.is_int8 else ""
        return getattr(self._library, f"pl_block_{name}_{coded}{self._suffix}")


class Block:
    """Attention and MLP of one layer; what is normed before attention is the layer's affair."""

    def __init__(self, shape: BlockShape, weights: BlockWeights, kv_layer: int, window: int = 0) -> None:
        """kv_layer: the pool's layer that holds its KV; window: positions that a row sees, up to its own; 0: all."""
        self.shape, self.kv_layer, self.window = shape, kv_layer, window
        self.scale = 1.0 / math.sqrt(shape.head_dim)
        self.qkv_proj, self.o_proj = weights.qkv, weights.o
        self.q_norm, self.k_norm, self.post_norm = weights.q_norm, weights.k_norm, weights.post_norm
        self.gate_up_proj, self.down_proj = weights.gate_up, weights.down
        library = self.qkv_proj.library  # which has packed the weights
        self.calls = None if library is None else BlockCalls(self, library)

    def write(self, x: torch.Tensor, table: torch.Tensor, batch: ForwardBatch, kv: KvPool) -> torch.Tensor:
        """x: [T, width], normed; table: float32 [max_positions, head_dim], see layers.rotary.

        The rows' KV goes to the pool; returns the rotated queries, [T, num_heads, head_dim].
        """
        calls, pages = self.calls, kv.data[self.kv_layer]
        if calls is None:
            return self._write(x, table, batch, pages)
        x, rows = x.contiguous(), x.shape[0]
        out = x.new_empty(rows, self.shape.num_heads, self.shape.head_dim)
        scratch = x.new_empty(rows, calls.write_scratch)
        calls.call("write", kv)(
            calls.address, rows, x.data_ptr(), table.data_ptr(), batch.positions.data_ptr(),
            batch.write_slots.data_ptr(), pages.shape[2], pages.data_ptr(), scratch.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def finish(self, query: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """query: [T, num_heads, head_dim] of rows whose KV is in the pool; residual: [T, hidden_size], updated in place
        by what attention adds -> what the MLP adds, [T, hidden_size]."""
        calls, plan = self.calls, self.kernel_plan(context)
        if calls is None or plan is None:
            return self._finish(query, residual, context)
        rows, pages = query.shape[0], context.kv.data[self.kv_layer]
        out = torch.empty_like(residual)
        scratch = query.new_empty(rows, calls.finish_scratch)
        failed = calls.call("finish", context.kv)(
            calls.address, rows, query.data_ptr(), *plan.addresses, pages.data_ptr(), pages.shape[2],
            scratch.data_ptr(), residual.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return self.checked(out, failed)

    def kernel_plan(self, context: ForwardContext) -> RowPlan | None:
        """The batch's plan, where the kernels can go on past attention: they need this rank's sums to be whole."""
        whole = self.o_proj.whole and self.down_proj.whole
        plan = context.plan
        return plan if whole and isinstance(context.attention, CpuAttention) and isinstance(plan, RowPlan) else None

    # ---- step by step

    def _write(self, x: torch.Tensor, table: torch.Tensor, batch: ForwardBatch, pages: torch.Tensor) -> torch.Tensor:
        shape, rows = self.shape, x.shape[0]
        kv_dim = shape.num_kv_heads * shape.head_dim
        q, k, v = torch.split_with_sizes(self.qkv_proj(x), (shape.num_heads * shape.head_dim, kv_dim, kv_dim), dim=-1)
        q, k, v = (t.view(rows, -1, shape.head_dim) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rms_norm(q, self.q_norm, shape.rms_norm_eps), rms_norm(k, self.k_norm, shape.rms_norm_eps)
        return rope_write(q, k, v, table, batch.positions, batch.write_slots, pages)

    def _finish(self, query: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        out = context.attention.attend(query, context.kv, self.kv_layer, context.plan, self.scale, self.window)
        x = self.o_proj(out.view(query.shape[0], -1))
        x = add_rms_norm(x, residual, self.post_norm, self.shape.rms_norm_eps)
        return self.down_proj(silu_mul(self.gate_up_proj(x)))

    def checked(self, out: torch.Tensor, failed: int) -> torch.Tensor:
        """``out``, unless the kernels ``failed``: ValueError."""
        if failed:
            shape = self.shape
            raise ValueError(
                f"no attention kernel for {shape.num_heads} heads over {shape.num_kv_heads} of {shape.head_dim}"
            )
        return out
