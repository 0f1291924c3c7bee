"""Grouped attention and experts: Qwen3-MoE, and GLM-4.5 with the same block for its MTP module."""

from __future__ import annotations

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.quantized import LinearWeight
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel, PreNormLayer
from paceline.models.deepseek_shapes import mlp_shapes, moe_of
from paceline.models.grouped_attention import GroupedAttention
from paceline.models.llama_shapes import Shapes, attention_shapes
from paceline.models.loader import WeightBag
from paceline.models.moe import MoeMlp, shared_mlp


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Shapes of decoder layer ``layer``, or of an MTP module's block (layer >= num_layers), without its prefix."""
    norms: Shapes = {f"{name}_layernorm.weight": (spec.hidden_size,) for name in ("input", "post_attention")}
    return norms | attention_shapes(spec, spec.hidden_size) | mlp_shapes(spec, layer)


class MoeDecoderLayer(PreNormLayer):
    """Pre-norm attention and a dense or expert MLP."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, prefix: str, layer: int, kv_layer: int) -> None:
        """``prefix`` names the layer in the checkpoint; ``layer``, its number there, decides between dense and experts;
        ``kv_layer`` is its layer of the pool."""
        shapes = layer_shapes(spec, layer)

        def take(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}", shapes[name])

        def linear(name: str) -> LinearWeight:
            rows, columns = shapes[name]
            return weights.take_linear(f"{prefix}.{name}", (rows, columns))

        self.eps = spec.rms_norm_eps
        self.attention = GroupedAttention(spec, take, linear, kv_layer, spec.window(layer), ranks=weights.ranks)
        self.input_norm = take("input_layernorm.weight")
        self.post_norm = take("post_attention_layernorm.weight")
        moe = moe_of(spec)
        slabs, ranks, dense = spec.sum_slabs, weights.ranks, moe.is_dense(layer)
        self.mlp = shared_mlp(linear, "mlp", slabs, ranks) if dense else MoeMlp(moe, take, linear, slabs, ranks)


class MoeDecoderModel(DecoderModel[MoeDecoderLayer]):
    """A model of these families."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> None:
        """See DecoderModel."""

        def make_layer(weights: WeightBag, i: int) -> MoeDecoderLayer:
            return MoeDecoderLayer(spec, weights, f"model.layers.{i}", i, i)

        kv_layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> MoeDecoderLayer:
        """See TargetModel. The block of an MTP module: of the kind that follows the target's last layer."""
        return MoeDecoderLayer(self.spec, weights, prefix, self.spec.num_layers, kv_layer)
