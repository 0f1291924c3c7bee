"""What all families share around their layers: embedding, residual stream, final norm, LM head."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import torch

from paceline.kvcache.layout import KvLayer
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm
from paceline.layers.rotary import rope_table
from paceline.models.base import AuxCapture, DecoderBlock, ForwardContext, TargetModel
from paceline.models.config import ModelSpec
from paceline.models.loader import WeightBag

Layer = TypeVar("Layer", bound=DecoderBlock)


class PreNormLayer:
    """A decoder layer whose rows are normed before attention and before the MLP. A subclass gives it its parts."""

    eps: float
    input_norm: torch.Tensor  # [hidden_size], before attention
    post_norm: torch.Tensor  # [hidden_size], before the MLP
    attention: Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]
    mlp: Callable[[torch.Tensor], torch.Tensor]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See DecoderBlock."""
        x = self.attention(add_rms_norm(x, residual, self.input_norm, self.eps), table, context)
        return self.mlp(add_rms_norm(x, residual, self.post_norm, self.eps))


class DecoderModel(TargetModel, Generic[Layer]):
    """Embedding, decoder layers, final norm, LM head."""

    float32_norms: ClassVar[bool] = False  # whether the weights of norms are held as float32, whatever the dtype is

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightBag,
        dtype: torch.dtype,
        device: torch.device,
        make_layer: Callable[[WeightBag, int], Layer],
        kv_layer: KvLayer,
    ) -> None:
        """Takes every tensor it needs from ``weights``; the caller checks that none is left.

        make_layer: layer i (0-based) from weights on ``device``; kv_layer: what each of them keeps of a token.
        """
        self.spec, self.dtype, self.device = spec, dtype, device
        self.ranks = weights.ranks
        weights = weights.onto(device, dtype)
        self.quantize = weights.scheme
        vocab = (spec.vocab_size, spec.hidden_size)
        self.embedding, tied = weights.take_table("model.embed_tokens.weight", vocab)
        self.layers = [make_layer(weights, i) for i in range(spec.num_layers)]
        self.norm = weights.take("model.norm.weight", (spec.hidden_size,))
        head = weights.as_head(tied) if spec.tie_word_embeddings else weights.take_linear("lm_head.weight", vocab)
        self.lm_head = Linear(head, out_float32=True)
        longest = spec.max_position_embeddings
        table = rope_table(spec.head_dim, spec.rope_theta, longest, spec.rope_scaling, spec.rotary_dim)
        self.table = table.to(device)
        self.kv_layers = (kv_layer,) * spec.num_layers

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        return self.ranks.embed(self.embedding, token_ids)

    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """See TargetModel."""
        x = self.embed(context.batch.token_ids)
        residual = torch.zeros_like(x)
        x = self.run_layers(x, residual, self.ranks.context(context), aux)
        return add_rms_norm(x, residual, self.norm, self.spec.rms_norm_eps)

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor, context: ForwardContext, aux: AuxCapture | None
    ) -> torch.Tensor:
        """x: embedded rows, [T, hidden_size]; residual: of their shape, zeros, updated in place; aux, context: see
        ``forward`` -> what the last layer adds last."""
        for i, layer in enumerate(self.layers):
            if aux is not None:
                aux.see(i, x, residual)
            x = layer(x, residual, self.table, context)
            context.layer_done(i)
        if aux is not None:
            aux.see(len(self.layers), x, residual)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        return self.ranks.logits(self.lm_head(hidden))

    def rope_table(self) -> torch.Tensor:
        """See TargetModel."""
        return self.table
