"""The model families: how each one's ``config.json`` is read, and which class runs it. No torch here.

A new model is its own file, with a ``TargetModel``, and one record here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.models.deepseek_config import read_mla, read_moe, read_mtp_modules


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
    sliding_window: bool | None = None  # whether it slides unless use_sliding_window says; None: it has no window
    rope_scalings: tuple[str, ...] = ("default", "linear", "llama3")
    # Fields of ModelSpec that it reads in its own way, or that no other family has.
    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]] = _no_fields


def _deepseek_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    mla = read_mla(raw)
    return {
        "mla": mla,
        "moe": read_moe(raw),
        "num_mtp_modules": read_mtp_modules(raw),
        "head_dim": mla.rope_dim,
        "num_kv_heads": int(raw["num_attention_heads"]),  # all heads read one latent row; config's number means nothing
    }


LLAMA_MODEL = "paceline.models.llama:LlamaModel"
FAMILIES = {  # by the name of the architecture in config.json
    "LlamaForCausalLM": Family(
        "llama", LLAMA_MODEL, kv_heads_optional=True, reads_attention_bias=True, reads_mlp_bias=True
    ),
    "MistralForCausalLM": Family("mistral", LLAMA_MODEL, sliding_window=True),
    "Qwen2ForCausalLM": Family("qwen2", LLAMA_MODEL, qkv_bias=True, sliding_window=False),
    "Qwen3ForCausalLM": Family(
        "qwen3", LLAMA_MODEL, head_dim=128, reads_attention_bias=True, qk_norm=True, sliding_window=False
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek_v3",
        "paceline.models.deepseek_v3:DeepseekV3Model",
        kv_heads_optional=True,
        reads_attention_bias=True,
        rope_scalings=("default", "linear", "llama3", "yarn"),
        read_fields=_deepseek_fields,
    ),
}
