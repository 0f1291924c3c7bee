"""Names and shapes of DeepSeek-V3's tensors (algorithms.md F5); the model takes its weights by them."""

from __future__ import annotations

from paceline.models.config import ModelSpec
from paceline.models.deepseek_config import MlaSpec
from paceline.models.llama_shapes import Shapes
from paceline.models.moe_config import MoeSpec


def mla_of(spec: ModelSpec) -> MlaSpec:
    """The latent attention of a spec of this family."""
    assert spec.mla is not None
    return spec.mla


def moe_of(spec: ModelSpec) -> MoeSpec:
    """The experts of a spec of this family."""
    assert spec.moe is not None
    return spec.moe


def attention_shapes(spec: ModelSpec) -> Shapes:
    """Shapes of ``self_attn``, named from the layer on."""
    mla, hidden, heads = mla_of(spec), spec.hidden_size, spec.num_heads
    queries = heads * mla.query_dim
    shapes: Shapes = {
        "kv_a_proj_with_mqa.weight": (mla.latent_dim, hidden),
        "kv_a_layernorm.weight": (mla.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (mla.nope_dim + mla.value_dim), mla.kv_lora_rank),
        "o_proj.weight": (hidden, heads * mla.value_dim),
    }
    if mla.q_lora_rank is None:
        shapes["q_proj.weight"] = (queries, hidden)
    else:
        shapes |= {
            "q_a_proj.weight": (mla.q_lora_rank, hidden),
            "q_a_layernorm.weight": (mla.q_lora_rank,),
            "q_b_proj.weight": (queries, mla.q_lora_rank),
        }
    if spec.attention_bias:
        shapes |= {"kv_a_proj_with_mqa.bias": (mla.latent_dim,), "o_proj.bias": (hidden,)}
        if mla.q_lora_rank is not None:
            shapes["q_a_proj.bias"] = (mla.q_lora_rank,)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def swiglu_shapes(prefix: str, hidden: int, wide: int) -> Shapes:
    """Shapes of one gated MLP."""
    shapes = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def mlp_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Shapes of layer ``layer``'s MLP, or of its router and experts, named from the layer on."""
    moe, hidden = moe_of(spec), spec.hidden_size
    if moe.is_dense(layer):
        return swiglu_shapes("mlp", hidden, spec.intermediate_size)
    shapes: Shapes = {"mlp.gate.weight": (moe.num_experts, hidden)}
    if moe.correction_bias:
        shapes["mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    for i in range(moe.num_experts):
        shapes |= swiglu_shapes(f"mlp.experts.{i}", hidden, moe.intermediate_size)
    if moe.num_shared_experts:
        shapes |= swiglu_shapes("mlp.shared_experts", hidden, moe.shared_width)
    return shapes


def layer_shapes(spec: ModelSpec, layer: int) -> Shapes:
    """Shapes of decoder layer ``layer``, or of an MTP module's block (layer >= num_layers), without its prefix."""
    hidden = spec.hidden_size
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    return shapes | attention_shapes(spec) | mlp_shapes(spec, layer)


def mtp_shapes(spec: ModelSpec) -> Shapes:
    """Shapes of an MTP module without its copies of embedding and head, named from its prefix on."""
    hidden = spec.hidden_size
    own: Shapes = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
    }
    return own | layer_shapes(spec, spec.num_layers)
