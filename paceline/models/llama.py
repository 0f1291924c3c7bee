"""The Llama family: Llama, Mistral, Qwen2 (bias on q, k, v) and Qwen3 (RMSNorm on each head of q and k)."""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear, fuse
from paceline.layers.ops import add_rms_norm
from paceline.layers.rotary import rope_table
from paceline.models.base import AuxCapture, ForwardContext, TargetModel
from paceline.models.block import Block, BlockWeights
from paceline.models.config import ModelSpec
from paceline.models.loader import WeightBag


class DecoderLayer(Block):
    """Pre-norm attention and SwiGLU. Also the block of an MTP module, with its own KV layer."""

    def __init__(self, spec: ModelSpec, weights: WeightBag, prefix: str, kv_layer: int) -> None:
        """``prefix`` names the layer in the checkpoint, e.g. ``model.layers.0``; ``kv_layer`` its layer of the pool."""
        hidden, dim = spec.hidden_size, spec.head_dim
        sizes = (spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim)
        attn = f"{prefix}.self_attn"
        names = ("q_proj", "k_proj", "v_proj")
        qkv = [weights.take(f"{attn}.{name}.weight", (size, hidden)) for name, size in zip(names, sizes, strict=True)]
        bias = None
        if spec.attention_bias:
            bias = torch.cat([weights.take(f"{attn}.{n}.bias", (s,)) for n, s in zip(names, sizes, strict=True)])
        out_bias = weights.take(f"{attn}.o_proj.bias", (hidden,)) if spec.attention_out_bias else None
        gate_up, down = self._mlp(spec, weights, f"{prefix}.mlp")
        parts = BlockWeights(
            qkv=Linear(fuse(qkv), bias),
            o=Linear(weights.take(f"{attn}.o_proj.weight", (hidden, sizes[0])), out_bias),
            q_norm=weights.take(f"{attn}.q_norm.weight", (dim,)) if spec.qk_norm else None,
            k_norm=weights.take(f"{attn}.k_norm.weight", (dim,)) if spec.qk_norm else None,
            post_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            gate_up=gate_up,
            down=down,
        )
        super().__init__(spec, parts, kv_layer)
        self.input_norm = weights.take(f"{prefix}.input_layernorm.weight", (hidden,))

    @staticmethod
    def _mlp(spec: ModelSpec, weights: WeightBag, prefix: str) -> tuple[Linear, Linear]:
        wide = (spec.intermediate_size, spec.hidden_size)
        biases: list[torch.Tensor | None] = [None, None, None]
        if spec.mlp_bias:
            shapes = ((wide[0],), (wide[0],), (wide[1],))
            names = ("gate_proj", "up_proj", "down_proj")
            biases = [weights.take(f"{prefix}.{n}.bias", s) for n, s in zip(names, shapes, strict=True)]
        gate, up = (weights.take(f"{prefix}.{name}.weight", wide) for name in ("gate_proj", "up_proj"))
        both = torch.cat((biases[0], biases[1])) if biases[0] is not None and biases[1] is not None else None
        down = Linear(weights.take(f"{prefix}.down_proj.weight", wide[::-1]), biases[2])
        return Linear(fuse((gate, up)), both), down

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """x: what the block before added, not yet in the residual stream; residual: [T, hidden], updated in place.

        Returns what this block adds last; the caller's next ``add_rms_norm`` folds it in.
        """
        return self.run(x, residual, self.input_norm, table, context)


class LlamaModel(TargetModel):
    """Embedding, decoder layers, final norm, LM head."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightBag,
        dtype: torch.dtype,
        device: torch.device,
        first_kv_layer: int = 0,
        kv_owner: LayerOwner = LayerOwner.TARGET,
    ) -> None:
        """Takes every tensor it needs from ``weights``; the caller checks that none is left.

        first_kv_layer: the pool's layer that holds its layer 0; kv_owner: DRAFT for a model that drafts for another.
        """
        self.spec, self.dtype, self.device = spec, dtype, device
        weights = weights.onto(device)
        vocab = (spec.vocab_size, spec.hidden_size)
        self.embedding = weights.take_table("model.embed_tokens.weight", vocab)
        self.layers = [
            DecoderLayer(spec, weights, f"model.layers.{i}", first_kv_layer + i) for i in range(spec.num_layers)
        ]
        self.norm = weights.take("model.norm.weight", (spec.hidden_size,))
        head = self.embedding if spec.tie_word_embeddings else weights.take("lm_head.weight", vocab)
        self.lm_head = Linear(head, out_float32=True)
        table = rope_table(spec.head_dim, spec.rope_theta, spec.max_position_embeddings, spec.rope_scaling)
        self.table = table.to(device)
        layer = KvLayer(LayerKind.GQA, kv_owner, spec.num_kv_heads, spec.head_dim)
        self.kv_layers = (layer,) * spec.num_layers

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        return self.embedding[token_ids]

    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """See TargetModel."""
        x = self.embed(context.batch.token_ids)
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            if aux is not None:
                aux.see(i, x, residual)
            x = layer(x, residual, self.table, context)
            context.layer_done(i)
        if aux is not None:
            aux.see(len(self.layers), x, residual)
        return add_rms_norm(x, residual, self.norm, self.spec.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        return self.lm_head(hidden)

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> DecoderLayer:
        """See TargetModel. Its MLP may have another width than the target's."""
        width = weights.shape(f"{prefix}.mlp.gate_proj.weight")[0]
        return DecoderLayer(replace(self.spec, intermediate_size=width), weights, prefix, kv_layer)

    def rope_table(self) -> torch.Tensor:
        """See TargetModel."""
        return self.table
