"""Gemma 3 (arXiv 2503.19786), its language model: layers with a sliding window and a rope of their own between layers
that see all; four norms a layer, whose weights are stored as w for a scale of 1 + w; GEGLU; scaled embeddings."""

from __future__ import annotations

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm, gelu_mul, rms_norm
from paceline.layers.quantized import LinearWeight
from paceline.layers.rotary import rope_table
from paceline.models.base import ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel
from paceline.models.deepseek_shapes import swiglu_shapes
from paceline.models.grouped_attention import GroupedAttention
from paceline.models.llama_shapes import Shapes, attention_shapes
from paceline.models.loader import WeightBag
from paceline.models.quantization.fusing import fuse_layers

NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")


def layer_shapes(spec: ModelSpec) -> Shapes:
    """Shapes of a decoder layer, named from its prefix on."""
    norms: Shapes = {f"{name}_layernorm.weight": (spec.hidden_size,) for name in NORMS}
    mlp = swiglu_shapes("mlp", spec.hidden_size, spec.intermediate_size)
    return norms | attention_shapes(spec, spec.hidden_size) | mlp


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """What a norm multiplies by, float32: one more than the checkpoint has."""
    return 1.0 + weight.float()


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(
        self, spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int, window: int, table: torch.Tensor | None
    ) -> None:
        """table: rope of its own; None: the model's."""
        shapes = layer_shapes(spec)

        def take(name: str) -> torch.Tensor:
            tensor = weights.take(f"{prefix}.{name}", shapes[name])
            return scale_of(tensor) if name.endswith("norm.weight") else tensor

        def linear(name: str) -> LinearWeight:
            rows, columns = shapes[name]
            return weights.take_linear(f"{prefix}.{name}", (rows, columns))

        self.eps, self.table = spec.rms_norm_eps, table
        self.norms = [take(f"{name}_layernorm.weight") for name in NORMS]
        self.attention = GroupedAttention(spec, take, linear, kv_layer, window, ranks=weights.ranks)
        gate_up = {f"{prefix}.mlp.{name}_proj": linear(f"mlp.{name}_proj.weight") for name in ("gate", "up")}
        self.gate_up_proj = Linear(fuse_layers(gate_up))
        self.down_proj = weights.ranks.row_linear(linear("mlp.down_proj.weight"), None, spec.sum_slabs)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See DecoderBlock."""
        before, after, before_mlp, after_mlp = self.norms
        x = add_rms_norm(x, residual, before, self.eps)
        x = self.attention(x, table if self.table is None else self.table, context)
        x = add_rms_norm(rms_norm(x, after, self.eps), residual, before_mlp, self.eps)
        return rms_norm(self.down_proj(gelu_mul(self.gate_up_proj(x))), after_mlp, self.eps)


class Gemma3Model(DecoderModel[Gemma3Layer]):
    """A model of the family."""

    float32_norms = True

    def __init__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> None:
        """See DecoderModel."""
        local: torch.Tensor | None = None
        if spec.local_rope_theta is not None:
            local = rope_table(spec.head_dim, spec.local_rope_theta, spec.max_position_embeddings).to(device)

        def make_layer(weights: WeightBag, i: int) -> Gemma3Layer:
            window = spec.window(i)
            return Gemma3Layer(spec, weights, f"model.layers.{i}", i, window, local if window else None)

        kv_layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)
        self.norm = scale_of(self.norm)
        self.embedding_scale = (
            torch.tensor(spec.hidden_size**0.5, device="cpu").to(dtype).item()
        )  # rounded, as it was trained

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        return super().embed(token_ids) * self.embedding_scale

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> Gemma3Layer:
        """See TargetModel. A layer that sees all."""
        return Gemma3Layer(self.spec, weights, prefix, kv_layer, 0, None)
