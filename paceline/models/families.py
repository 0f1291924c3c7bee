"""The model families: how each one's ``config.json`` is read, and which class runs it. No torch here.

A new model is its own file, with a ``TargetModel``, and one record here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ConfigError
from paceline.models.deepseek_config import read_mla, read_mtp_modules
from paceline.models.moe_config import dense_layers, read_grouped_moe, softmax_moe


def _everywhere(raw: Mapping[str, Any], layer: int) -> bool:
    return True


def _upper_layers(raw: Mapping[str, Any], layer: int) -> bool:
    return layer >= int(raw.get("max_window_layers", 28))


def _all_but_every_sixth(raw: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % int(raw.get("sliding_window_pattern") or 6) != 0


def _every_second(raw: Mapping[str, Any], layer: int) -> bool:
    return layer % 2 == 0


def _no_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """What sets a family apart from plain pre-norm attention and SwiGLU with rope."""

    name: str
    model: str  # "module:class", a TargetModel; imported when a model is loaded
    head_dim: int | None = None  # where config.json has none; None: hidden_size over the number of heads
    kv_heads_optional: bool = False  # a missing num_key_value_heads means one per query head
    reads_attention_bias: bool = False  # attention_bias: on q, k, v and o
    qkv_bias: bool = False  # on q, k and v in any case
    reads_mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of q and k
    slides: bool | None = None  # whether it has windows unless use_sliding_window says; None: it has none
    slides_at: Callable[[Mapping[str, Any], int], bool] = _everywhere  # the layers, where layer_types does not say
    rope_theta: float | None = None  # where config.json has none; None: Hugging Face's default
    quant_methods: tuple[str, ...] = ()  # of quantised checkpoints that its class reads itself
    rotary_share: float = 1.0  # of a head's elements that rope turns, where config.json does not say
    rope_scalings: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    local_rope: bool = False  # layers with a window have a rope of their own
    # Fields of ModelSpec that it reads in its own way, or that no other family has.
    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_fields


def _deepseek_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    mla = read_mla(raw)
    return {
        "mla": mla,
        "moe": read_grouped_moe(raw),
        "num_mtp_modules": read_mtp_modules(raw),
        "head_dim": mla.rope_dim,
        "num_kv_heads": int(raw["num_attention_heads"]),  # all heads read one latent row; config's number means nothing
    }


def _qwen3_moe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    experts = raw.get("num_experts", raw.get("num_local_experts"))
    if experts is None:
        raise KeyError("num_experts")
    moe = softmax_moe(
        int(experts),
        int(raw["num_experts_per_tok"]),
        int(raw["moe_intermediate_size"]),
        bool(raw.get("norm_topk_prob", False)),
    )
    return {"moe": replace(moe, dense_layers=dense_layers(raw))}


def _glm4_moe_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "moe": read_grouped_moe(raw),
        "num_mtp_modules": read_mtp_modules(raw),
        "qk_norm": bool(raw.get("use_qk_norm", False)),
        "attention_out_bias": False,  # attention_bias is of q, k and v alone
    }


def _gemma3_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(key):
            raise ConfigError("model", f"{key} {raw[key]} is not supported")
    if (activation := raw.get("hidden_activation") or GELU) != GELU:
        raise ConfigError("model", f"hidden_activation {activation!r} is not supported ({GELU})")
    rope = (raw.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (kind := rope.get("rope_type", "default")) != "default":
        raise ConfigError("model", f"rope scaling {kind!r} is not supported for the sliding layers of gemma3 (default)")
    return {
        "local_rope_theta": float(rope.get("rope_theta") or raw.get("rope_local_base_freq") or 10000.0),
        "attention_scale": float(raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", True)),
        "qk_norm": True,
    }


def _gpt_oss_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    experts = raw.get("num_local_experts", raw.get("num_experts"))
    if experts is None:
        raise KeyError("num_local_experts")
    moe = softmax_moe(int(experts), int(raw["num_experts_per_tok"]), int(raw["intermediate_size"]), True)
    biased = bool(raw.get("attention_bias", True))
    return {
        "moe": moe,
        "clamp": (float(raw.get("swiglu_alpha") or 1.702), float(raw.get("swiglu_limit") or 7.0)),
        "attention_bias": biased,
        "attention_out_bias": biased,
    }


def _mimo_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_mtp_modules": read_mtp_modules(raw)}


def _ministral3_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling")
    if not rope:
        raise KeyError("rope_parameters")
    if not rope.get("llama_4_scaling_beta"):
        return {}
    # Queries of later positions are multiplied by a logarithm of theirs, which the kernels know nothing of.
    return {"max_position_embeddings": min(int(raw["max_position_embeddings"]), int(rope[ORIGINAL]))}


ORIGINAL = "original_max_position_embeddings"
LLAMA_MODEL = "paceline.models.llama:LlamaModel"
MOE_MODEL = "paceline.models.moe_decoder:MoeDecoderModel"
GELU = "gelu_pytorch_tanh"
FAMILIES = {  # by the name of the architecture in config.json
    "LlamaForCausalLM": Family(
        "llama", LLAMA_MODEL, kv_heads_optional=True, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": Family("mistral", LLAMA_MODEL, slides=True),
    "Ministral3ForCausalLM": Family(
        "ministral3", LLAMA_MODEL, head_dim=128, slides=True, read_fields=_ministral3_fields
    ),
    "Qwen2ForCausalLM": Family("qwen2", LLAMA_MODEL, qkv_bias=True, slides=False, slides_at=_upper_layers),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        LLAMA_MODEL,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
        slides=False,
        slides_at=_upper_layers,
    ),
    "MiMoForCausalLM": Family(
        "mimo", LLAMA_MODEL, qkv_bias=True, slides=False, slides_at=_upper_layers, read_fields=_mimo_fields
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        MOE_MODEL,
        head_dim=128,
        reads_attention_bias=True,
        qk_norm=True,
        slides=False,
        read_fields=_qwen3_moe_fields,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        MOE_MODEL,
        reads_attention_bias=True,
        rotary_share=0.5,
        read_fields=_glm4_moe_fields,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        "paceline.models.gemma3:Gemma3Model",
        head_dim=256,
        reads_attention_bias=True,
        slides=True,
        slides_at=_all_but_every_sixth,
        rope_theta=1e6,
        rope_scalings=("default", "linear"),
        local_rope=True,
        read_fields=_gemma3_fields,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "paceline.models.gpt_oss:GptOssModel",
        head_dim=64,
        slides=True,
        slides_at=_every_second,
        rope_theta=150000.0,
        rope_scalings=("default", "yarn"),
        quant_methods=("mxfp4",),
        read_fields=_gpt_oss_fields,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        "paceline.models.deepseek_v3:DeepseekV3Model",
        kv_heads_optional=True,
        reads_attention_bias=True,
        read_fields=_deepseek_fields,
    ),
}
