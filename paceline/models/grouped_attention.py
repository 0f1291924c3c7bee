"""Attention of a decoder layer, step by step: grouped heads with or without biases, norms on heads, partial rope, a
sliding window and sinks. Families whose layer is not ``block.Block`` are made of it."""

from __future__ import annotations

import torch

from paceline.layers.linear import Linear, device_of
from paceline.layers.ops import rms_norm, rope_write
from paceline.layers.quantized import LinearWeight
from paceline.layers.rotary import rotary_order
from paceline.models.base import ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.moe import Take, TakeLinear
from paceline.models.one_rank import ONE_RANK, OneRank
from paceline.models.quantization.fusing import fuse_layers, reordered


class GroupedAttention:
    """q, k and v as one product, attention over the paged pool, the projection back."""

    def __init__(
        self,
        spec: ModelSpec,
        take: Take,
        linear: TakeLinear,
        kv_layer: int,
        window: int,
        sinks: torch.Tensor | None = None,
        ranks: OneRank = ONE_RANK,
    ) -> None:
        """take: tensors by their names from the layer on; linear: weights as the checkpoint has them.

        kv_layer: the pool's layer that holds its KV; window, sinks: see AttentionBackend.attend.
        """
        self.spec, self.kv_layer, self.window, self.sinks = spec, kv_layer, window, sinks
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        order = None if spec.rotary_dim is None else rotary_order(spec.head_dim, spec.rotary_dim)

        def turned(tensor: torch.Tensor) -> torch.Tensor:
            """A tensor of whole heads, its elements in the order in which rope turns them."""
            if order is None:
                return tensor
            return tensor.view(-1, spec.head_dim, *tensor.shape[1:])[:, order.to(tensor.device)].view_as(tensor)

        def weight(part: str) -> LinearWeight:
            found = linear(f"{part}.weight")
            if order is None or part.endswith("v_proj"):
                return found
            rows = turned(torch.arange(found.shape[0]))
            return reordered(found, rows.to(device_of(found)))

        def bias_of(part: str) -> torch.Tensor:
            found = take(f"{part}.bias")
            return found if part.endswith("v_proj") else turned(found)

        parts = [f"self_attn.{name}_proj" for name in "qkv"]
        bias = torch.cat([bias_of(part) for part in parts]) if spec.attention_bias else None
        self.qkv_proj = Linear(fuse_layers({part: weight(part) for part in parts}), bias)
        out_bias = take("self_attn.o_proj.bias") if spec.attention_out_bias else None
        self.o_proj = ranks.row_linear(linear("self_attn.o_proj.weight"), out_bias, spec.sum_slabs)
        self.head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if spec.qk_norm:
            self.head_norms = turned(take("self_attn.q_norm.weight")), turned(take("self_attn.k_norm.weight"))

    def __call__(self, x: torch.Tensor, table: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x: [T, hidden_size], normed -> [T, hidden_size]; writes the rows' KV first."""
        spec, batch, rows = self.spec, context.batch, x.shape[0]
        q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = torch.split_with_sizes(self.qkv_proj(x), (q_dim, kv_dim, kv_dim), dim=-1)
        query, key, value = (part.view(rows, -1, spec.head_dim) for part in parts)
        if self.head_norms is not None:
            query = rms_norm(query, self.head_norms[0], spec.rms_norm_eps)
            key = rms_norm(key, self.head_norms[1], spec.rms_norm_eps)
        pages = context.kv.data[self.kv_layer]
        query = rope_write(query, key, value, table, batch.positions, batch.write_slots, pages)
        out = context.attention.attend(
            query, context.kv, self.kv_layer, context.plan, self.scale, self.window, self.sinks
        )
        return self.o_proj(out.view(rows, -1))
