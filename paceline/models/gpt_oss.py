"""gpt-oss (arXiv 2508.10925): sinks in every layer, a sliding window in every second one, experts with biases and a
clamped SwiGLU. Experts in MXFP4 (OCP Microscaling Formats 1.0) stay in 4 bits on a CPU; elsewhere they become weights
of the node's dtype at load."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.bits import by_kernels, makes_exact
from paceline.layers.by_expert import by_expert
from paceline.layers.linear import Linear
from paceline.layers.ops import clamped_swiglu
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.layers.routing import route
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel, PreNormLayer
from paceline.models.deepseek_shapes import moe_of, swiglu_shapes
from paceline.models.grouped_attention import GroupedAttention
from paceline.models.llama_shapes import Shapes, attention_shapes
from paceline.models.loader import NOT_ROUNDED, WeightBag, rounded_weight
from paceline.models.moe import DealtExperts, Experts, Take, TakeLinear, grouped, routing_rule, stacked, weighted_sum
from paceline.models.one_rank import ONE_RANK, OneRank
from paceline.models.quantization.fp4 import float4_weight, powers_of_two
from paceline.models.quantization.fusing import fuse_layers

MXFP4_BLOCK = 32  # elements of a row that share a scale


def layer_shapes(spec: ModelSpec, mxfp4: bool, experts: int | None = None) -> Shapes:
    """Shapes of a decoder layer, named from its prefix on. mxfp4: as the experts' products are stored; experts: of this
    rank; None: all."""
    moe, hidden = moe_of(spec), spec.hidden_size
    experts, wide = moe.num_experts if experts is None else experts, moe.intermediate_size
    shapes = _shapes_around_experts(spec)
    for name, out, width in (("gate_up_proj", 2 * wide, hidden), ("down_proj", hidden, wide)):
        shapes[f"mlp.experts.{name}_bias"] = (experts, out)
        if mxfp4:
            groups = width // MXFP4_BLOCK
            shapes[f"mlp.experts.{name}_blocks"] = (experts, out, groups, MXFP4_BLOCK // 2)
            shapes[f"mlp.experts.{name}_scales"] = (experts, out, groups)
        else:
            shapes[f"mlp.experts.{name}"] = (experts, width, out)
    return shapes


def _shapes_around_experts(spec: ModelSpec) -> Shapes:
    moe, hidden = moe_of(spec), spec.hidden_size
    shapes: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes |= attention_shapes(spec, hidden) | {"self_attn.sinks": (spec.num_heads,)}
    return shapes | {"mlp.router.weight": (moe.num_experts, hidden), "mlp.router.bias": (moe.num_experts,)}


def named_shapes(spec: ModelSpec, held: range) -> Shapes:
    """``layer_shapes`` where each of the experts ``held`` has tensors of its own, see NamedExperts."""
    shapes, hidden, wide = _shapes_around_experts(spec), spec.hidden_size, moe_of(spec).intermediate_size
    for i in held:
        shapes |= swiglu_shapes(f"mlp.experts.{i}", hidden, wide)
        biases = {"gate_proj": wide, "up_proj": wide, "down_proj": hidden}
        shapes |= {f"mlp.experts.{i}.{name}.bias": (size,) for name, size in biases.items()}
    return shapes


def mxfp4_weight(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """blocks: uint8 [out, groups, 16], two elements a byte, the lower half first; scales: uint8 [out, groups], powers
    of two -> [out, 32 * groups]."""
    return float4_weight(blocks.flatten(1), powers_of_two(scales), MXFP4_BLOCK)


class ExpertWeights:
    """What a layer's checkpoint has of its experts. Expert i's parts, each read when it is asked for.

    Weights are codes where a CPU runs them and the checkpoint has codes, or they are ``rounded`` by a scheme; else
    tensors of ``dtype``.
    """

    def __init__(self, take: Take, mxfp4: bool, dtype: torch.dtype, scheme: str = NOT_ROUNDED) -> None:
        """scheme: see WeightBag."""
        self.down_bias = take("mlp.experts.down_proj_bias")  # [experts, hidden]
        self._gate_up_bias = take("mlp.experts.gate_up_proj_bias")
        self._dtype, self._scheme = dtype, scheme
        self._by_kernels = by_kernels(self.down_bias.device)
        self._gate_up, self.down = (self._reader(take, name, mxfp4) for name in ("gate_up_proj", "down_proj"))

    def _reader(self, take: Take, name: str, mxfp4: bool) -> Callable[[int], LinearWeight]:
        """Expert i's weight of one product, [out_features, in_features]."""
        if not mxfp4:
            every, scheme = take(f"mlp.experts.{name}"), self._scheme if self._by_kernels else NOT_ROUNDED
            return lambda i: rounded_weight(every[i].t(), scheme)
        blocks, scales = take(f"mlp.experts.{name}_blocks"), take(f"mlp.experts.{name}_scales")
        if blocks.is_meta:  # a dry run
            shape = (blocks.shape[1], blocks.shape[2] * MXFP4_BLOCK)
            return lambda i: blocks.new_empty(shape, dtype=self._dtype)
        if self._by_kernels:
            return lambda i: mxfp4_weight(blocks[i], scales[i])
        return lambda i: mxfp4_weight(blocks[i], scales[i]).dequantised().to(self._dtype)

    def gate_up(self, i: int) -> tuple[LinearWeight, LinearWeight]:
        """Weights of gate and of up, [intermediate, hidden] each, which the checkpoint has by turns."""
        both = self._gate_up(i)
        if isinstance(both, torch.Tensor):
            return both[0::2], both[1::2]
        return both.of_rows(slice(0, None, 2)), both.of_rows(slice(1, None, 2))

    def gate_up_bias(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Their biases."""
        return self._gate_up_bias[i][0::2], self._gate_up_bias[i][1::2]


class NamedExperts:
    """The same where each expert has tensors of its own, gate and up apart, as GGUF files are read. Each is asked for
    once."""

    def __init__(self, take: Take, linear: TakeLinear, held: range) -> None:
        """take, linear: a layer's tensor as floats, and as the checkpoint has it; held: the experts' numbers there."""
        self._take, self._held = take, held
        self.down_bias = torch.stack([take(f"mlp.experts.{i}.down_proj.bias") for i in held])  # [experts, hidden]
        self._read: TakeLinear = linear if by_kernels(self.down_bias.device) else take

    def gate_up(self, i: int) -> tuple[LinearWeight, LinearWeight]:
        """See ExpertWeights."""
        name = f"mlp.experts.{self._held[i]}"
        return self._read(f"{name}.gate_proj.weight"), self._read(f"{name}.up_proj.weight")

    def gate_up_bias(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Their biases."""
        name = f"mlp.experts.{self._held[i]}"
        return self._take(f"{name}.gate_proj.bias"), self._take(f"{name}.up_proj.bias")

    def down(self, i: int) -> LinearWeight:
        """Expert i's weight of the last product, [hidden, intermediate]."""
        return self._read(f"mlp.experts.{self._held[i]}.down_proj.weight")


AnyExperts = ExpertWeights | NamedExperts


def fused_gate_up(weights: AnyExperts, i: int) -> LinearWeight:
    """Expert i's gate above its up, [2 * intermediate, hidden]."""
    gate, up = weights.gate_up(i)
    return fuse_layers({f"experts.{i}.gate_proj": gate, f"experts.{i}.up_proj": up})


def _floats(*weights: LinearWeight) -> list[torch.Tensor]:
    """Weights that are no codes, as they are where there are no kernels of the CPU."""
    found = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    assert len(found) == len(weights)
    return found


class ClampedExpert:
    """One expert."""

    def __init__(
        self,
        gate_up: tuple[LinearWeight, torch.Tensor],
        down: tuple[LinearWeight, torch.Tensor],
        clamp: tuple[float, float],
    ) -> None:
        """gate_up, down: weight and bias."""
        self.gate_up_proj, self.down_proj, self.clamp = Linear(*gate_up), Linear(*down, out_float32=True), clamp

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> float32 [T, hidden]."""
        return self.down_proj(clamped_swiglu(self.gate_up_proj(x), *self.clamp))


class SeparateClampedExperts:
    """Each expert a module of its own, see models/moe.py."""

    def __init__(
        self, weights: AnyExperts, num_experts: int, clamp: tuple[float, float], ranks: OneRank = ONE_RANK
    ) -> None:
        """weights: of this rank's experts."""
        experts = [
            ClampedExpert(
                (fused_gate_up(weights, i), torch.cat(weights.gate_up_bias(i))),
                (weights.down(i), weights.down_bias[i]),
                clamp,
            )
            for i in range(len(ranks.experts(num_experts)))
        ]
        self._dealt = DealtExperts(experts, num_experts, ranks)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor | None:
        """See SeparateExperts."""
        return self._dealt(x, expert_ids)


class GroupedClampedExperts:
    """All experts as stacked weights, for a GPU, see models/moe.py."""

    def __init__(self, weights: AnyExperts, num_experts: int, clamp: tuple[float, float]) -> None:
        self._gate_up = stacked(lambda i: _floats(*weights.gate_up(i)), num_experts)
        self._gate_up_bias = stacked(weights.gate_up_bias, num_experts)
        self._down = stacked(lambda i: _floats(weights.down(i)), num_experts)
        self._down_bias, self._clamp = weights.down_bias, clamp

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """See GroupedExperts."""
        sort = by_expert(expert_ids, self._down.shape[0])
        gate_up = grouped(x[sort.sources], self._gate_up, sort.ends) + self._gate_up_bias[sort.experts]
        down = grouped(clamped_swiglu(gate_up, *self._clamp), self._down, sort.ends) + self._down_bias[sort.experts]
        return sort.in_rows(down, expert_ids.shape[1])


def clamped_experts(
    weights: AnyExperts, num_experts: int, clamp: tuple[float, float], ranks: OneRank = ONE_RANK
) -> Experts:
    """The experts of a layer, as their device runs them. ranks: who has which of them."""
    device = weights.down_bias.device
    if len(ranks.experts(num_experts)) < num_experts:  # see models/moe.py
        return SeparateClampedExperts(weights, num_experts, clamp, ranks)
    if not makes_exact(device):
        if device.type == "cpu":
            return SeparateClampedExperts(weights, num_experts, clamp, ranks)
        return GroupedClampedExperts(weights, num_experts, clamp)
    from paceline.layers.exact_products import Matrices
    from paceline.models.exact_experts import ExactExperts

    bias = stacked(weights.gate_up_bias, num_experts).float()
    return ExactExperts(
        Matrices.stack(lambda i: fused_gate_up(weights, i), num_experts),
        Matrices.stack(weights.down, num_experts),
        lambda rows: clamped_swiglu(rows, *clamp),
        (bias, weights.down_bias.float().contiguous()),
    )


class GptOssMlp:
    """Router and experts of one layer."""

    def __init__(self, spec: ModelSpec, take: Take, weights: AnyExperts, ranks: OneRank) -> None:
        moe, self.ranks = moe_of(spec), ranks
        assert spec.clamp is not None
        self.rule = routing_rule(moe)
        self.router = Linear(take("mlp.router.weight").float(), take("mlp.router.bias"))
        self.experts = clamped_experts(weights, moe.num_experts, spec.clamp, ranks)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        expert_ids, weights = route(self.router(x.float()), None, self.rule)
        outputs = self.experts(x, expert_ids)
        return self.ranks.told(None if outputs is None else weighted_sum(outputs, weights).to(x.dtype), x)


class GptOssLayer(PreNormLayer):
    """Pre-norm attention and experts."""

    def __init__(
        self, spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int, window: int, dtype: torch.dtype
    ) -> None:
        held = weights.ranks.experts(moe_of(spec).num_experts)
        mxfp4 = weights.holds(f"{prefix}.mlp.experts.down_proj_blocks")
        named = weights.holds(f"{prefix}.mlp.experts.{held.start}.down_proj.weight")
        shapes = named_shapes(spec, held) if named else layer_shapes(spec, mxfp4, len(held))

        def take(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}", shapes[name])

        def linear(name: str) -> LinearWeight:
            rows, columns = shapes[name]
            return weights.take_linear(f"{prefix}.{name}", (rows, columns))

        self.eps = spec.rms_norm_eps
        self.input_norm = take("input_layernorm.weight").float()  # rounded once, after the weight
        self.post_norm = take("post_attention_layernorm.weight").float()
        sinks = take("self_attn.sinks").float().contiguous()
        self.attention = GroupedAttention(spec, take, linear, kv_layer, window, sinks, weights.ranks)
        experts = NamedExperts(take, linear, held) if named else ExpertWeights(take, mxfp4, dtype, weights.scheme)
        self.mlp = GptOssMlp(spec, take, experts, weights.ranks)


class GptOssModel(DecoderModel[GptOssLayer]):
    """A model of the family."""

    float32_norms = True

    def __init__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> None:
        """See DecoderModel."""

        def make_layer(weights: WeightBag, i: int) -> GptOssLayer:
            return GptOssLayer(spec, weights, f"model.layers.{i}", i, spec.window(i), dtype)

        kv_layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)
        self.norm = self.norm.float()

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> GptOssLayer:
        """See TargetModel. A layer that sees all."""
        return GptOssLayer(self.spec, weights, prefix, kv_layer, 0, self.dtype)
