"""The DeepSeek-V3 family: latent attention (MLA), experts, and the same blocks for its MTP modules.

Attention runs in the absorbed form at every length (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the key projection
is folded into the query and the value projection into the output, so that a row reads only latents from the pool.
Expanding keys for a long prompt would be faster there, and would give its rows other bits than decode gives them.
"""

from __future__ import annotations

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.ops import latent_write, rms_norm
from paceline.layers.per_head_linear import HeadsLinear
from paceline.layers.quantized import LinearWeight
from paceline.layers.rotary import yarn_mscale
from paceline.models.base import ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel, PreNormLayer
from paceline.models.deepseek_shapes import layer_shapes, mla_of, moe_of
from paceline.models.loader import WeightBag
from paceline.models.moe import MoeMlp, Take, TakeLinear, shared_mlp
from paceline.models.one_rank import OneRank
from paceline.models.quantization.fusing import reordered

LATENT_NORM_EPS = 1e-6  # of the norms on the low-rank rows, whatever rms_norm_eps says


def softmax_scale(spec: ModelSpec) -> float:
    """1/sqrt of a head's query width; yarn's ``mscale_all_dim`` raises it (twice: for query and key)."""
    scale: float = mla_of(spec).query_dim ** -0.5
    yarn = spec.rope_scaling or {}
    if all_dim := yarn.get("mscale_all_dim"):
        scale *= yarn_mscale(yarn["factor"], all_dim) ** 2
    return scale


def halves(weight: torch.Tensor, heads: int, start: int) -> torch.Tensor:
    """Rope rows from neighbouring pairs to rotate-half order: from ``start`` on, even ones first, then odd ones.

    weight: [heads * (start + rope_dim), ...], a projection's weight or bias.
    """
    split = weight.view(heads, -1, *weight.shape[1:])
    return torch.cat((split[:, :start], split[:, start::2], split[:, start + 1 :: 2]), dim=1).view_as(weight)


def halved(weight: LinearWeight, heads: int, start: int) -> LinearWeight:
    """``halves`` of a linear layer's weight."""
    if isinstance(weight, torch.Tensor):
        return halves(weight, heads, start)
    return reordered(weight, halves(torch.arange(weight.shape[0], device=weight.codes.device), heads, start))


class LatentAttention:
    """Multi-head latent attention of one layer."""

    def __init__(self, spec: ModelSpec, take: Take, linear: TakeLinear, kv_layer: int, ranks: OneRank) -> None:
        """take: a tensor of the layer as floats; linear: as the checkpoint has it.

        ``kv_b_proj`` is split and folded into the query and the output, so it is taken as floats.
        """
        self.spec, self.mla, self.kv_layer = spec, mla_of(spec), kv_layer
        self.scale = softmax_scale(spec)
        self._load_queries(take, linear)
        mla, heads = self.mla, spec.num_heads
        down = linear("self_attn.kv_a_proj_with_mqa.weight")
        down_bias = take("self_attn.kv_a_proj_with_mqa.bias") if spec.attention_bias else None
        if mla.rope_interleave:
            down = halved(down, 1, mla.kv_lora_rank)
            down_bias = None if down_bias is None else halves(down_bias, 1, mla.kv_lora_rank)
        self.kv_down = Linear(down, down_bias)
        self.kv_norm = take("self_attn.kv_a_layernorm.weight").contiguous()
        up = take("self_attn.kv_b_proj.weight").view(heads, mla.nope_dim + mla.value_dim, mla.kv_lora_rank)
        self.absorbed_key = HeadsLinear(up[:, : mla.nope_dim].transpose(1, 2))  # query's nope part -> latent
        self.absorbed_value = HeadsLinear(up[:, mla.nope_dim :])  # latent -> value
        out_bias = take("self_attn.o_proj.bias") if spec.attention_bias else None
        self.o_proj = ranks.row_linear(linear("self_attn.o_proj.weight"), out_bias, spec.sum_slabs)

    def _load_queries(self, take: Take, linear: TakeLinear) -> None:
        mla, biased = self.mla, self.spec.attention_bias
        self.q_down: Linear | None = None
        if mla.q_lora_rank is not None:
            bias = take("self_attn.q_a_proj.bias") if biased else None
            self.q_down = Linear(linear("self_attn.q_a_proj.weight"), bias)
            self.q_norm = take("self_attn.q_a_layernorm.weight")
        up = linear("self_attn.q_proj.weight" if mla.q_lora_rank is None else "self_attn.q_b_proj.weight")
        self.q_up = Linear(halved(up, self.spec.num_heads, mla.nope_dim) if mla.rope_interleave else up)

    def __call__(self, x: torch.Tensor, table: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x: [T, hidden] (normed) -> [T, hidden]; writes the rows' latents first."""
        mla, batch, rows, heads = self.mla, context.batch, x.shape[0], self.spec.num_heads
        wide = x if self.q_down is None else rms_norm(self.q_down(x), self.q_norm, LATENT_NORM_EPS)
        split = self.q_up(wide).view(rows, heads, mla.query_dim)
        nope, rope = torch.split_with_sizes(split, (mla.nope_dim, mla.rope_dim), dim=-1)
        query = x.new_empty(rows, heads, mla.latent_dim)
        self.absorbed_key(nope, query[..., : mla.kv_lora_rank])
        latent_write(
            rope, self.kv_down(x), self.kv_norm, LATENT_NORM_EPS, table,
            batch.positions, batch.write_slots, context.kv.data[self.kv_layer], query,
        )  # fmt: skip
        latent = context.attention.attend_latent(
            query, context.kv, self.kv_layer, context.plan, self.scale, mla.kv_lora_rank
        )
        values = x.new_empty(rows, heads, mla.value_dim)
        self.absorbed_value(latent, values)
        return self.o_proj(values.view(rows, -1))


class DeepseekDecoderLayer(PreNormLayer):
    """Pre-norm attention and a dense or expert MLP. Also the block of an MTP module, with its own KV layer."""

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
        self.attention = weights.ranks.attention(lambda ranks: LatentAttention(spec, take, linear, kv_layer, ranks))
        self.input_norm = take("input_layernorm.weight")
        self.post_norm = take("post_attention_layernorm.weight")
        moe = moe_of(spec)
        slabs, ranks, dense = spec.sum_slabs, weights.ranks, moe.is_dense(layer)
        self.mlp = shared_mlp(linear, "mlp", slabs, ranks) if dense else MoeMlp(moe, take, linear, slabs, ranks)


class DeepseekV3Model(DecoderModel[DeepseekDecoderLayer]):
    """A model of the family. Its rope table is rope_dim wide."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> None:
        """See DecoderModel."""

        def make_layer(weights: WeightBag, i: int) -> DeepseekDecoderLayer:
            return DeepseekDecoderLayer(spec, weights, f"model.layers.{i}", i, i)

        kv_layer = KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, mla_of(spec).latent_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> DeepseekDecoderLayer:
        """See TargetModel. The block of an MTP module: of the kind that follows the target's last layer."""
        return DeepseekDecoderLayer(self.spec, weights, prefix, self.spec.num_layers, kv_layer)
