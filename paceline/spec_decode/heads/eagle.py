"""EAGLE-1/2 (arXiv 2401.15077, 2406.16858) and EAGLE-3 (arXiv 2503.01840) heads over the paged pool (algorithms.md C).

EAGLE-2 is EAGLE-1's weights under dynamic trees. A head's layer has its own geometry: heads, widths and rope may all
differ from the target's. Rows keep their bits whatever rows lie beside them, as in the target
(docs/internals/exactness.md).
"""

from __future__ import annotations

import torch

from paceline.attention.base import ForwardBatch
from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.ops import rms_norm
from paceline.layers.quantized import LinearWeight
from paceline.layers.rotary import rope_table
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.block import Block, BlockWeights
from paceline.models.loader import WeightBag
from paceline.models.quantization.fusing import fuse_layers
from paceline.spec_decode.heads.base import DraftHead, LastRows
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config
from paceline.spec_decode.heads.formats.eagle import vocabulary_map
from paceline.spec_decode.heads.formats.layer import LayerShape, refused

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class EagleLayer(Block):
    """Attention over rows of ``width``, then a SwiGLU MLP; what is normed before attention is the head's affair."""

    def __init__(
        self, shape: LayerShape, weights: WeightBag, prefix: str, width: int, kv_layer: int, table: torch.Tensor
    ) -> None:
        """table: float32 [max_positions, head_dim], see layers.rotary."""
        self.table = table
        shapes = shape.tensor_shapes(prefix, width)

        def take(name: str) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}", shapes[f"{prefix}.{name}"])

        def linear(name: str) -> LinearWeight:
            rows, columns = shapes[f"{prefix}.{name}"]
            return weights.take_linear(f"{prefix}.{name}", (rows, columns))

        def take_if_any(name: str) -> torch.Tensor | None:
            return take(name) if f"{prefix}.{name}" in shapes else None

        qkv_bias = torch.cat([take(f"self_attn.{name}.bias") for name in QKV]) if shape.attention_bias else None
        gate_up_bias = torch.cat([take(f"mlp.{name}.bias") for name in GATE_UP]) if shape.mlp_bias else None
        parts = BlockWeights(
            qkv=Linear(fuse_layers({name: linear(f"self_attn.{name}.weight") for name in QKV}), qkv_bias),
            o=Linear(linear("self_attn.o_proj.weight"), take_if_any("self_attn.o_proj.bias")),
            q_norm=take_if_any("self_attn.q_norm.weight"),
            k_norm=take_if_any("self_attn.k_norm.weight"),
            post_norm=take("post_attention_layernorm.weight"),
            gate_up=Linear(fuse_layers({name: linear(f"mlp.{name}.weight") for name in GATE_UP}), gate_up_bias),
            down=Linear(linear("mlp.down_proj.weight"), take_if_any("mlp.down_proj.bias")),
        )
        super().__init__(shape, parts, kv_layer)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """x: [T, width]; residual: [T, hidden_size], overwritten -> the stream after the layer, [T, hidden_size]."""
        query = self.write(x, self.table, context.batch, context.kv)
        added = self.finish(query, residual, context)
        return residual + added

    def extend(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, last: LastRows) -> torch.Tensor:
        """The same as `__call__`, of the last rows alone: the others need no more than their KV."""
        query = self.write(x, self.table, batch, last.context.kv)
        kept = residual[last.rows]
        added = self.finish(query[last.rows], kept, last.context)
        return kept + added


def _table(model: TargetModel, shape: LayerShape) -> torch.Tensor:
    """Rope of the head's own config, as long as the TARGET's contexts: heads often name a shorter length."""
    spec = model.spec
    own = (shape.head_dim, shape.rope_theta, shape.rope_scaling, None)
    if (spec.head_dim, spec.rope_theta, spec.rope_scaling, spec.rotary_dim) == own:
        return model.rope_table()
    table = rope_table(shape.head_dim, shape.rope_theta, spec.max_position_embeddings, shape.rope_scaling)
    return table.to(model.device)


class Embedding:
    """The target's table, or a head's own where that differs; a copy of the target's is let go."""

    def __init__(self, model: TargetModel, own: torch.Tensor | None) -> None:
        """own: [at least the target's vocab_size, hidden_size of the head]."""
        vocab = model.spec.vocab_size
        if own is not None and own.shape[0] < vocab:
            raise refused(f"embed_tokens has {own.shape[0]} rows, the target {vocab} tokens")
        self.model = model
        self.own = None if own is not None and self._is_copy(own) else own

    def _is_copy(self, own: torch.Tensor) -> bool:
        spec = self.model.spec
        every = torch.arange(spec.vocab_size, device=self.model.device)
        return own.shape == (spec.vocab_size, spec.hidden_size) and torch.equal(own, self.model.embed(every))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T] -> [T, hidden_size of the head]."""
        return self.model.embed(token_ids) if self.own is None else self.own[token_ids]


def _kv_layer(shape: LayerShape) -> KvLayer:
    return KvLayer(LayerKind.GQA, LayerOwner.DRAFT, shape.num_kv_heads, shape.head_dim)


class Eagle1Head(DraftHead):
    """x = fc([e(t_{i+1}) ; f_i]), one layer without input norm, the target's LM head on its output (C4).

    f_i is the target's hidden row after its final norm; the output is the prediction of f_{i+1}.
    """

    def __init__(self, model: TargetModel, weights: WeightBag, config: Eagle1Config, kv_layer: int) -> None:
        """Takes every tensor of ``config.tensor_shapes()``. Raises ConfigError where head and target do not fit."""
        shape = config.shape
        if shape.hidden_size != model.spec.hidden_size:
            raise refused(f"this head is for a target of width {shape.hidden_size}, not {model.spec.hidden_size}")
        shapes = config.tensor_shapes()
        self.model, self.hidden_size = model, shape.hidden_size
        bias = weights.take("fc.bias", shapes["fc.bias"]) if config.bias else None
        self.fc = Linear(weights.take("fc.weight", shapes["fc.weight"]), bias)
        own = weights.take("embed_tokens.weight", shapes["embed_tokens.weight"]) if config.own_embedding else None
        self.embedding = Embedding(model, own)
        self.layer = EagleLayer(shape, weights, "layers.0", shape.hidden_size, kv_layer, _table(model, shape))
        self.kv_layers = (_kv_layer(shape),)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        x = self._joined(token_ids, hidden)
        return self.layer(x, x, context)  # read by attention before it is overwritten

    def extend(self, batch: ForwardBatch, hidden: torch.Tensor, last: LastRows) -> torch.Tensor:
        """See DraftHead."""
        x = self._joined(batch.token_ids, hidden)
        return self.layer.extend(x, x, batch, last)

    def _joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.cat((self.embedding(token_ids), hidden), dim=-1))  # embedding first

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead; no norm before the target's LM head."""
        return self.model.logits(output)


class Eagle3Head(DraftHead):
    """Rows of several target layers joined by fc, a layer over (embedding, row), a head over few tokens (C6).

    ``forward`` returns a_i, the stream before the final norm (with ``norm_output`` after it); the next step is fed
    it as it is, without fc.
    """

    fuses = True

    def __init__(self, model: TargetModel, weights: WeightBag, config: Eagle3Config, kv_layer: int) -> None:
        """Takes every tensor of ``config.tensor_shapes()``. Raises ConfigError where head and target do not fit."""
        shape, shapes = config.shape, config.tensor_shapes()
        self.config, self.eps, self.hidden_size = config, shape.rms_norm_eps, shape.hidden_size
        self.aux_layers = aux_layers_for(model, config)

        def take(name: str) -> torch.Tensor:
            return weights.take(name, shapes[name])

        self.input_norm = take("input_norm.weight") if config.norm_before_fc else None
        self.fc_norm = [take(f"fc_norm.{i}.weight") for i in range(config.num_aux)] if config.fc_norm else []
        self.fc = Linear(take("fc.weight"))
        self.input_layernorm = take("midlayer.input_layernorm.weight")
        self.hidden_norm = take("midlayer.hidden_norm.weight")
        self.layer = EagleLayer(shape, weights, "midlayer", 2 * shape.hidden_size, kv_layer, _table(model, shape))
        self.norm = take("norm.weight")
        self.lm_head = Linear(weights.take_linear("lm_head.weight"), out_float32=True)
        self.embedding = Embedding(model, take("embed_tokens.weight") if config.own_embedding else None)
        if not config.own_embedding and shape.hidden_size != model.spec.hidden_size:
            raise refused(f"a head of width {shape.hidden_size} needs embed_tokens of its own, but has none")
        self.token_map = self._token_map(model, weights)
        self.kv_layers = (_kv_layer(shape),)

    def _token_map(self, model: TargetModel, weights: WeightBag) -> torch.Tensor | None:
        draft, vocab = self.config.draft_vocab_size, model.spec.vocab_size
        if self.config.mapped:
            ids = vocabulary_map(weights.take("d2t", (draft,)), weights.take("t2d", (self.config.vocab_size,)))
        else:
            ids = torch.arange(draft)
        if int(ids.max()) >= vocab:
            raise refused(f"this head drafts token {int(ids.max())}, the target has {vocab} tokens")
        return None if draft == vocab else ids.to(model.device)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftHead. hidden: [T, len(aux_layers) * target hidden_size]."""
        if self.input_norm is not None:
            hidden = rms_norm(hidden, self.input_norm, self.eps)
        if self.fc_norm:
            chunks = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([rms_norm(c, w, self.eps) for c, w in zip(chunks, self.fc_norm, strict=True)], dim=-1)
        return self.fc(hidden)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        x, residual = self._joined(token_ids, hidden)
        return self._after(self.layer(x, residual, context))

    def extend(self, batch: ForwardBatch, hidden: torch.Tensor, last: LastRows) -> torch.Tensor:
        """See DraftHead."""
        x, residual = self._joined(batch.token_ids, hidden)
        return self._after(self.layer.extend(x, residual, batch, last))

    def _joined(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer reads and what it adds to."""
        embedded = rms_norm(self.embedding(token_ids), self.input_layernorm, self.eps)
        normed = rms_norm(hidden, self.hidden_norm, self.eps)
        residual = normed if self.config.norm_before_residual else hidden.clone()  # the drafter keeps ``hidden``
        return torch.cat((embedded, normed), dim=-1), residual

    def _after(self, output: torch.Tensor) -> torch.Tensor:
        return rms_norm(output, self.norm, self.eps) if self.config.norm_output else output

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        normed = output if self.config.norm_output else rms_norm(output, self.norm, self.eps)
        return self.lm_head(normed)


def aux_layers_for(model: TargetModel, config: Eagle3Config) -> tuple[int, ...]:
    """Layers of the target whose input rows the head reads (0-based; the layer count means after the last).

    Without a list in the config: layers 2, L/2 and L-3. Raises ConfigError where the target has no such rows.
    """
    count = model.spec.num_layers
    layers = config.aux_layers if config.aux_layers is not None else (2, count // 2, count - 3)
    if not all(0 <= layer <= count for layer in layers):
        raise refused(f"this head reads layers {list(layers)} of a target that has {count}")
    if config.target_hidden_size != model.spec.hidden_size:
        raise refused(f"this head is for a target of width {config.target_hidden_size}, not {model.spec.hidden_size}")
    return layers
