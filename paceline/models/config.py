"""What a Hugging Face ``config.json`` says about a model. No torch here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.model_files import read_eos_token_ids, read_json
from paceline.models.deepseek_config import MlaSpec, MoeSpec, read_mla, read_moe, read_mtp_modules

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
DEEPSEEK = "deepseek_v3"
# What each kind of rope scaling needs beside its name.
ROPE_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_OPTIONS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")  # absent or null: default
DEFAULT_ROPE_THETA = 10000.0  # this and the next two are Hugging Face's own defaults
DEFAULT_RMS_NORM_EPS = 1e-6
QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a target model. Sizes in elements."""

    family: str  # llama, mistral, qwen2, qwen3 or deepseek_v3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # deepseek_v3: of the rope part, see mla
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # None: plain rope; else {"rope_type": "linear" | "llama3" | "yarn", ...}
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k, v (deepseek_v3: on the projections down to the ranks)
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on each head of q and k
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    mla: MlaSpec | None = None  # latent attention: deepseek_v3
    moe: MoeSpec | None = None  # experts: deepseek_v3
    num_mtp_modules: int = 0  # that the checkpoint may carry, as layers num_layers, num_layers + 1, ...

    @property
    def max_model_len(self) -> int:
        """Longest context served: within a sliding window, which is not implemented, full attention is the same."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read ``config.json`` (and ``generation_config.json`` for the end-of-sequence ids).

        Raises ConfigError naming whatever is missing or would need code that is not here.
        """
        path = folder / "config.json"
        raw = read_json(path)
        try:
            return cls._from_json(raw, read_eos_token_ids(folder))
        except KeyError as error:
            raise ConfigError("model", f"{path} lacks {error.args[0]!r}") from None
        except (TypeError, ValueError) as error:
            raise ConfigError("model", f"{path} cannot be read: {error}") from None

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelSpec:
        family = _family(raw)
        _refuse_unsupported(raw)
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        head_dim = raw.get("head_dim") or (QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads)
        deepseek = family == DEEPSEEK
        mla = read_mla(raw) if deepseek else None
        theta, scaling = _rope(raw, family)
        bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3", DEEPSEEK)  # others: not read
        return cls(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=_kv_heads(raw, family, heads),
            head_dim=mla.rope_dim if mla is not None else int(head_dim),
            rms_norm_eps=float(raw.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bias or family == "qwen2",
            attention_out_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            sliding_window=_sliding_window(raw, family),
            eos_token_ids=eos_token_ids,
            bos_token_id=None if raw.get("bos_token_id") is None else int(raw["bos_token_id"]),
            mla=mla,
            moe=read_moe(raw) if deepseek else None,
            num_mtp_modules=read_mtp_modules(raw) if deepseek else 0,
        )


def _family(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ConfigError("model", f"architecture {names} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _kv_heads(raw: Mapping[str, Any], family: str, heads: int) -> int:
    """Absent means one per query head only for Llama; the other families have other defaults, so they must say it."""
    if family == DEEPSEEK:
        return heads  # all heads read one latent row; the number means nothing
    given = raw.get("num_key_value_heads", heads) if family == "llama" else raw["num_key_value_heads"]
    return int(given or heads)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """What would otherwise load and give wrong text."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ConfigError("model", f"quantized checkpoints are not supported (quant_method {method!r})")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError("model", f"hidden_act {activation!r} is not supported (silu)")


def _rope(raw: Mapping[str, Any], family: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). transformers 5 writes ``rope_parameters`` where 4 wrote ``rope_theta`` and ``rope_scaling``."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    supported = [name for name in ROPE_SCALINGS if name != "yarn" or family == DEEPSEEK]
    if kind not in supported:
        raise ConfigError("model", f"rope scaling {kind!r} is not supported for {family} ({', '.join(supported)})")
    if (share := rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) not in (None, 1.0):
        raise ConfigError("model", f"partial_rotary_factor {share} is not supported (1.0)")
    if kind == "default":
        return theta, None
    scaling: dict[str, Any] = {"rope_type": kind} | {name: float(rope[name]) for name in ROPE_SCALINGS[kind]}
    if kind == "yarn":
        scaling |= {name: float(rope[name]) for name in YARN_OPTIONS if rope.get(name) is not None}
        scaling |= {"truncate": bool(rope.get("truncate", True))}
    return theta, scaling


def _sliding_window(raw: Mapping[str, Any], family: str) -> int | None:
    if family in ("llama", DEEPSEEK) or not raw.get("use_sliding_window", family == "mistral"):
        return None
    window = raw.get("sliding_window")
    if window is None:
        return None
    if window < raw["max_position_embeddings"]:
        log.warning("sliding window of %d: contexts are capped to it, below the model's own length", window)
    return int(window)
