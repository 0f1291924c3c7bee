"""Layers of draft heads in plain torch, differentiable. Geometry and names are the target's (Llama family)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class HeadShape:
    """Sizes of a draft layer, in elements."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = torch.rsqrt(length.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad = x * scale, grads[0].to(scale.dtype)
        product = normed * grad
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        wide = weight.to(scale.dtype)
        along = (product @ wide).unsqueeze(-1) / x.shape[-1]  # of the gradient on the normed row
        grad_x = (grad * wide).sub_(normed.mul_(along)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RmsNorm(nn.Module):
    """RMSNorm in float32, returned in the dtype it came in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size]."""
        out: torch.Tensor = cast(Any, _RmsNorm).apply(x, self.weight, self.eps)
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size]."""
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # the inverse of a rotation is its transpose
        return (grads[0] * cos).addcmul_(grads[0].roll(cos.shape[-1] // 2, -1), sin, value=-1), None, None


def rotate(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, rotate-half. x: [n, heads, D]; table: float32 [max, D] (cos | sin); positions: int64 [n]."""
    cos, sin = table[positions].unsqueeze(1).to(x.dtype).chunk(2, dim=-1)
    wide_cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    turned: torch.Tensor = cast(Any, _Rotate).apply(x, wide_cos, signed_sin)
    return turned


@dataclass(frozen=True)
class Geometry:
    """Where queries and true rows of a batch lie. Made once per batch."""

    positions: torch.Tensor  # int64 [Q], of the queries at step 0
    row_positions: torch.Tensor  # int64 [R]
    query_counts: tuple[int, ...]  # per sample
    row_counts: tuple[int, ...]
    masks: tuple[torch.Tensor, ...]  # per sample [queries, rows]: 0 where the row is seen, -inf where not

    @classmethod
    def build(
        cls,
        positions: torch.Tensor,
        row_positions: torch.Tensor,
        query_counts: tuple[int, ...],
        row_counts: tuple[int, ...],
        dtype: torch.dtype,
    ) -> Geometry:
        """A query sees the rows of its sample up to its own position. dtype: of the heads' rows."""
        masks = []
        for at, rows in zip(
            torch.split_with_sizes(positions, query_counts),
            torch.split_with_sizes(row_positions, row_counts),
            strict=True,
        ):
            seen = rows[None] <= at[:, None]
            masks.append(torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf")))
        return cls(positions, row_positions, query_counts, row_counts, tuple(masks))


@dataclass
class Memory:
    """Keys and values that later draft steps attend: those of the true rows, then one per step and query."""

    keys: list[torch.Tensor]  # per sample [kv_heads, D, rows]
    values: list[torch.Tensor]  # per sample [kv_heads, rows, D]
    own: list[tuple[torch.Tensor, torch.Tensor]]  # per step >= 1: [Q, kv_heads, D] each


class Attention(nn.Module):
    """Grouped-query attention with the mask of training-time test (algorithms.md C7).

    A query at step s sees the true rows 0..i and, of each earlier step and its own, only its own column: a chain of
    drafted rows below row i, as at inference. Sample by sample, so that the scores stay in cache.
    """

    def __init__(self, shape: HeadShape, in_features: int) -> None:
        super().__init__()
        self.shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_features, q, bias=False)
        self.k_proj = nn.Linear(in_features, kv, bias=False)
        self.v_proj = nn.Linear(in_features, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden_size, bias=False)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], -1, self.shape.head_dim)

    def remember(self, rows: torch.Tensor, geometry: Geometry, table: torch.Tensor) -> Memory:
        """Keys and values of the true rows. rows: [R, in_features]."""
        keys = rotate(self._heads(self.k_proj(rows)), table, geometry.row_positions)
        values = self._heads(self.v_proj(rows))
        return Memory(
            [k.permute(1, 2, 0) for k in torch.split_with_sizes(keys, geometry.row_counts)],
            [v.transpose(0, 1) for v in torch.split_with_sizes(values, geometry.row_counts)],
            [],
        )

    def attend(
        self, x: torch.Tensor, step: int, memory: Memory, geometry: Geometry, table: torch.Tensor
    ) -> torch.Tensor:
        """x: [Q, in_features], the inputs of draft step ``step`` -> [Q, hidden_size]."""
        shape, positions = self.shape, (geometry.positions + step).clamp(max=table.shape[0] - 1)
        group = shape.num_heads // shape.num_kv_heads
        query = rotate(self._heads(self.q_proj(x)), table, positions) * shape.head_dim**-0.5
        if step:
            key = rotate(self._heads(self.k_proj(x)), table, positions)
            memory.own.append((key, self._heads(self.v_proj(x))))
        query = query.view(-1, shape.num_kv_heads, group, shape.head_dim)
        own = [(query * key.unsqueeze(2)).sum(-1) for key, _ in memory.own]  # [Q, kv_heads, group] each
        extra = torch.stack(own, dim=-1) if own else query.new_empty(*query.shape[:3], 0)
        outputs, own_weights = [], []
        for b, (q, e) in enumerate(
            zip(
                torch.split_with_sizes(query, geometry.query_counts),
                torch.split_with_sizes(extra, geometry.query_counts),
                strict=True,
            )
        ):
            out, weights = self._sample(q, e, memory.keys[b], memory.values[b], geometry.masks[b])
            outputs.append(out)
            own_weights.append(weights)
        out, weights = torch.cat(outputs), torch.cat(own_weights)
        for j, (_, value) in enumerate(memory.own):
            out = out + weights[..., j, None] * value.unsqueeze(2)
        projected: torch.Tensor = self.o_proj(out.reshape(x.shape[0], -1))
        return projected

    @staticmethod
    def _sample(
        query: torch.Tensor, extra: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query: [q, kv, group, D]; extra: [q, kv, group, own] -> (out over true rows [q, kv, group, D], weights)."""
        count, kv, group, dim = query.shape
        scores = query.permute(1, 2, 0, 3).reshape(kv, group * count, dim) @ keys  # [kv, group * q, rows]
        scores = scores.view(kv, group, count, -1).add_(mask)
        both = torch.cat((scores, extra.permute(1, 2, 0, 3)), dim=-1) if extra.shape[-1] else scores
        weights = torch.softmax(both, dim=-1)  # in float32 within, rounded once
        true = weights[..., : mask.shape[1]].reshape(kv, group * count, -1) @ values
        out = true.view(kv, group, count, dim).permute(2, 0, 1, 3)
        return out, weights[..., mask.shape[1] :].permute(2, 0, 1, 3)
