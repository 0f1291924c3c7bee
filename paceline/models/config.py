"""What a Hugging Face ``config.json`` says about a model of the Llama family."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_SCALINGS = ("default", "linear", "llama3")
DEFAULT_ROPE_THETA = 10000.0  # Hugging Face's own default


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a target model. Sizes in elements."""

    family: str  # llama, mistral, qwen2 or qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k, v
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on each head of q and k
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def max_model_len(self) -> int:
        """Longest context served: within a sliding window, which is not implemented, full attention is the same."""
        return min(self.max_position_embeddings, self.sliding_window or self.max_position_embeddings)

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read ``config.json`` (and ``generation_config.json`` for the end-of-sequence ids)."""
        raw = _read_json(folder / "config.json")
        family = _family(raw)
        heads = int(raw["num_attention_heads"])
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"} or None
        kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
        if kind not in ROPE_SCALINGS:
            raise ConfigError("model", f"rope scaling {kind!r} is not supported ({', '.join(ROPE_SCALINGS)})")
        window = raw.get("sliding_window") if raw.get("use_sliding_window", family == "mistral") else None
        if window:
            log.warning("sliding window %d: contexts are capped to it", window)
        return cls(
            family=family,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA),
            rope_scaling=scaling,
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
            attention_out_bias=family != "qwen2" and bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            sliding_window=window,
            eos_token_ids=_eos_ids(folder, raw),
            bos_token_id=raw.get("bos_token_id"),
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError("model", f"{path} is missing; expected a Hugging Face model folder")
    raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return raw


def _family(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    raise ConfigError("model", f"architecture {names} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _eos_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    value = raw.get("eos_token_id")
    if generation.is_file():
        value = _read_json(generation).get("eos_token_id", value)
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
