"""The one decoder layer of a draft head: what config.json says of it, and the shapes of its tensors. Reads no file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.models.config import (
    DEFAULT_RMS_NORM_EPS,
    DEFAULT_ROPE_THETA,
    ROPE_SCALINGS,
    YARN_OPTIONS,
    ModelSpec,
)
from paceline.models.llama_shapes import block_shapes

log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


def refused(message: str) -> ConfigError:
    """What every reader here raises."""
    return ConfigError("drafter_path", message)


def number(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of a config. Raises ConfigError."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise refused(f"config.json needs {key} as a positive integer, got {value!r}")
    return value


@dataclass(frozen=True)
class LayerShape:
    """The one decoder layer of a head. Sizes in elements."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None  # as ModelSpec's
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of_target(cls, spec: ModelSpec, intermediate_size: int = 0) -> LayerShape:
        """A layer like the target's own; 0 keeps the width of its MLP."""
        return cls(
            hidden_size=spec.hidden_size,
            intermediate_size=intermediate_size or spec.intermediate_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=spec.rms_norm_eps,
            rope_theta=spec.rope_theta,
            rope_scaling=spec.rope_scaling,
        )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], names: Seq[str], prefix: str) -> LayerShape:
        """Llama fields of a head's config. Which biases and norms there are is read off the tensor ``names``.

        Raises ConfigError for what is missing or would need code that is not here.
        """
        _refuse_unsupported(raw)
        hidden, heads = number(raw, "hidden_size"), number(raw, "num_attention_heads")
        theta, scaling = _rope(raw)
        found = set(names)
        bias = bool(raw.get("attention_bias", False))
        return cls(
            hidden_size=hidden,
            intermediate_size=number(raw, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=number(raw, "num_key_value_heads", heads),
            head_dim=number(raw, "head_dim", hidden // heads),
            rms_norm_eps=float(raw.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
            rope_theta=theta,
            rope_scaling=scaling,
            attention_bias=bias or f"{prefix}.self_attn.q_proj.bias" in found,
            attention_out_bias=f"{prefix}.self_attn.o_proj.bias" in found,
            mlp_bias=bool(raw.get("mlp_bias", False)) or f"{prefix}.mlp.gate_proj.bias" in found,
            qk_norm=f"{prefix}.self_attn.q_norm.weight" in found,
        )

    def to_json(self) -> dict[str, Any]:
        """The fields that ``from_json`` reads."""
        raw: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
        }
        return raw | ({"rope_scaling": self.rope_scaling} if self.rope_scaling else {})

    def tensor_shapes(self, prefix: str, width: int) -> Shapes:
        """Attention over rows of ``width``, the norm after it and the MLP; norms before it are the head's own."""
        return {f"{prefix}.{name}": shape for name, shape in block_shapes(self, width).items()}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise refused(f"hidden_act {activation!r} is not supported (silu)")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        log.warning("the head was trained with a window of %s rows; it attends to all", raw["sliding_window"])


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling; transformers 5 writes ``rope_parameters`` where 4 wrote ``rope_theta``, ``rope_scaling``."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or DEFAULT_ROPE_THETA)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_SCALINGS:
        raise refused(f"rope scaling {kind!r} is not supported ({', '.join(ROPE_SCALINGS)})")
    if (share := rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) not in (None, 1.0):
        raise refused(f"partial_rotary_factor {share} is not supported (1.0)")
    if missing := [name for name in ROPE_SCALINGS[kind] if rope.get(name) is None]:
        raise refused(f"rope scaling {kind!r} lacks {', '.join(missing)}")
    if kind == "default":
        return theta, None
    scaling: dict[str, Any] = {"rope_type": kind} | {name: float(rope[name]) for name in ROPE_SCALINGS[kind]}
    if kind == "yarn":
        scaling |= {name: float(rope[name]) for name in YARN_OPTIONS if rope.get(name) is not None}
        scaling |= {"truncate": bool(rope.get("truncate", True))}
    return theta, scaling
