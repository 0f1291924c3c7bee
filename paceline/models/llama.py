"""The Llama family: Llama, Mistral (sliding windows), Qwen2 and MiMo (bias on q, k, v), Qwen3 (RMSNorm on heads)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.models.base import AuxCapture, ForwardContext
from paceline.models.block import Block, BlockWeights
from paceline.models.config import ModelSpec
from paceline.models.decoder import DecoderModel
from paceline.models.layer_run import LayerRun
from paceline.models.llama_shapes import layer_shapes
from paceline.models.loader import WeightBag
from paceline.models.quantization.fusing import fuse_layers


class DecoderLayer(Block):
    """Pre-norm attention and SwiGLU. Also the block of an MTP module, with its own KV layer."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int, window: int = 0) -> None:
        """``prefix`` names the layer in the checkpoint, e.g. ``model.layers.0``; ``kv_layer`` its layer of the pool;
        ``window``: see Block."""
        shapes = layer_shapes(spec)

        def take(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}", shapes[name])

        def weight(name: str) -> LinearWeight:
            rows, columns = shapes[f"{name}_proj.weight"]
            return weights.take_linear(f"{prefix}.{name}_proj.weight", (rows, columns))

        def row_linear(name: str, biased: bool) -> Linear:
            bias = take(f"{name}_proj.bias") if biased else None
            return weights.ranks.row_linear(weight(name), bias, spec.sum_slabs)

        def fused(names: Sequence[str], biased: bool) -> Linear:
            bias = torch.cat([take(f"{name}_proj.bias") for name in names]) if biased else None
            return Linear(fuse_layers({f"{prefix}.{name}_proj": weight(name) for name in names}), bias)

        parts = BlockWeights(
            qkv=fused([f"self_attn.{n}" for n in "qkv"], spec.attention_bias),
            o=row_linear("self_attn.o", spec.attention_out_bias),
            q_norm=take("self_attn.q_norm.weight") if spec.qk_norm else None,
            k_norm=take("self_attn.k_norm.weight") if spec.qk_norm else None,
            post_norm=take("post_attention_layernorm.weight"),
            gate_up=fused(("mlp.gate", "mlp.up"), spec.mlp_bias),
            down=row_linear("mlp.down", spec.mlp_bias),
        )
        super().__init__(spec, parts, kv_layer, window)
        self.input_norm = take("input_layernorm.weight")

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """x: what the block before added, not yet in the residual stream; residual: [T, hidden], updated in place.

        Returns what this block adds last; the caller's next ``add_rms_norm`` folds it in.
        """
        return LayerRun([(self, self.input_norm)])(x, residual, table, context)


class LlamaModel(DecoderModel[DecoderLayer]):
    """A model of the family."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightBag,
        dtype: torch.dtype,
        device: torch.device,
        first_kv_layer: int = 0,
        kv_owner: LayerOwner = LayerOwner.TARGET,
    ) -> None:
        """See DecoderModel.

        first_kv_layer: the pool's layer that holds its layer 0; kv_owner: DRAFT for a model that drafts for another.
        """

        def make_layer(weights: WeightBag, i: int) -> DecoderLayer:
            return DecoderLayer(spec, weights, f"model.layers.{i}", first_kv_layer + i, spec.window(i))

        kv_layer = KvLayer(LayerKind.GQA, kv_owner, spec.num_kv_heads, spec.head_dim)
        super().__init__(spec, weights, dtype, device, make_layer, kv_layer)
        self._runs: dict[range, LayerRun] = {}

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor, context: ForwardContext, aux: AuxCapture | None
    ) -> torch.Tensor:
        """See DecoderModel. Layers between which nobody looks run together."""
        if context.after_layer is not None:
            return super().run_layers(x, residual, context, aux)
        for layers in runs_of(len(self.layers), () if aux is None else aux.layers):
            if aux is not None:
                aux.see(layers.start, x, residual)
            x = self._run_of(layers)(x, residual, self.table, context)
        if aux is not None:
            aux.see(len(self.layers), x, residual)
        return x

    def _run_of(self, layers: range) -> LayerRun:
        if layers not in self._runs:
            parts = self.layers[layers.start : layers.stop]
            self._runs[layers] = LayerRun([(layer, layer.input_norm) for layer in parts])
        return self._runs[layers]

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> DecoderLayer:
        """See TargetModel. Its MLP may have another width than the target's."""
        return llama_block(self.spec, weights, prefix, kv_layer)


def runs_of(num_layers: int, seen: Sequence[int]) -> list[range]:
    """Layers 0..num_layers-1 in runs, of which one begins at each of ``seen``."""
    starts = sorted({0, *(layer for layer in seen if layer < num_layers)})
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_layers], strict=True)]


def llama_block(spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int) -> DecoderLayer:
    """A layer from ``{prefix}.*`` whose MLP may have another width than the layers of ``spec``."""
    width = weights.shape(f"{prefix}.mlp.gate_proj.weight")[0]
    return DecoderLayer(replace(spec, intermediate_size=width), weights, prefix, kv_layer)
