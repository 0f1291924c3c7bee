"""Names and shapes of a Llama checkpoint's tensors, as transformers writes them; models take their weights by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.models.config import ModelSpec

Shapes = dict[str, tuple[int, ...]]


class LayerGeometry(Protocol):
    """What decides the tensors of a layer; ``ModelSpec``, and a draft head's own layer. Sizes in elements."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...
    @property
    def attention_out_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


def attention_shapes(layer: LayerGeometry, width: int) -> Shapes:
    """Attention over rows of ``width``, named from the layer on."""
    hidden, dim = layer.hidden_size, layer.head_dim
    q, kv = layer.num_heads * dim, layer.num_kv_heads * dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (hidden, q),
    }
    if layer.attention_bias:
        shapes |= {f"self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
    if layer.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if layer.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    return shapes


def block_shapes(layer: LayerGeometry, width: int) -> Shapes:
    """Attention over rows of ``width``, the norm after it and the MLP, named from the layer on."""
    hidden, wide = layer.hidden_size, layer.intermediate_size
    shapes = attention_shapes(layer, width) | {
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if layer.mlp_bias:
        shapes |= {f"mlp.{n}_proj.bias": (size,) for n, size in (("gate", wide), ("up", wide), ("down", hidden))}
    return shapes


def layer_shapes(spec: ModelSpec) -> Shapes:
    """A whole decoder layer, named from its prefix on."""
    return {"input_layernorm.weight": (spec.hidden_size,)} | block_shapes(spec, spec.hidden_size)


def model_shapes(spec: ModelSpec, layer: Callable[[int], Shapes] | None = None) -> Shapes:
    """A whole checkpoint. layer: shapes of layer i, for other families than Llama's."""
    vocab = (spec.vocab_size, spec.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": vocab}
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = vocab
    shapes["model.norm.weight"] = (spec.hidden_size,)
    for i in range(spec.num_layers):
        own = layer_shapes(spec) if layer is None else layer(i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    return shapes
