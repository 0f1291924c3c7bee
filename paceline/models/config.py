"""What a Hugging Face ``config.json`` says about a model. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.model_files import read_eos_token_ids, read_json
from paceline.models.deepseek_config import MlaSpec
from paceline.models.families import FAMILIES, Family
from paceline.models.moe_config import MoeSpec
from paceline.models.wrapped import WRAPPED, text_config
from paceline.parallel.slabs import sum_slabs

# What each kind of rope scaling needs beside its name.
ROPE_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
YARN_OPTIONS = (  # absent or null: default
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "attn_factor",
)  # fmt: skip
MAX_LAYERS, MAX_HEAD_DIM = 1 << 12, 1 << 16
MAX_POSITIONS = 1 << 24  # a table of angles has a row for each
DEFAULT_ROPE_THETA = 10000.0  # this and the next are Hugging Face's own defaults
DEFAULT_RMS_NORM_EPS = 1e-6
SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a target model. Sizes in elements."""

    family: str  # name of a record in families.py
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
    attention_bias: bool = False  # on q, k, v (deepseek_v3: on the projections down to the ranks)
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each head of q and k
    windows: tuple[int, ...] = ()  # positions that a row of each layer sees, up to its own; 0: all; (): all everywhere
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mla: MlaSpec | None = None  # latent attention: deepseek_v3
    moe: MoeSpec | None = None  # experts
    num_mtp_modules: int = 0  # that the checkpoint may carry
    rotary_dim: int | None = None  # elements of a head that rope turns, the first ones; None: all
    local_rope_theta: float | None = None  # of layers with a window: gemma3
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    clamp: tuple[float, float] | None = None  # slope and limit of the experts' activation: gpt_oss, which has sinks too

    @property
    def max_model_len(self) -> int:
        """Longest context served."""
        return self.max_position_embeddings

    @property
    def sum_slabs(self) -> int:
        """Slabs of its row-parallel products (parallel/slabs.py)."""
        return sum_slabs(self.num_heads)

    def special_attention(self, longest: int) -> bool:
        """Whether a layer has sinks, or a window shorter than the ``longest`` context: not every backend has them."""
        return self.clamp is not None or any(0 < window < longest for window in self.windows)

    def window(self, layer: int) -> int:
        """Positions that a row of a layer sees, up to its own; 0: all. A layer after the last (MTP) sees all."""
        return self.windows[layer] if layer < len(self.windows) else 0

    @property
    def mtp_prefixes(self) -> tuple[str, ...]:
        """What the names of its MTP modules' tensors begin with, module by module (algorithms.md F5 to F7)."""
        place = "model.mtp_layers.{}." if self.family == "mimo" else "model.layers.{}."
        first = 0 if self.family == "mimo" else self.num_layers
        return tuple(place.format(first + k) for k in range(self.num_mtp_modules))

    @classmethod
    def from_folder(cls, folder: Path) -> ModelSpec:
        """Read ``config.json`` (and ``generation_config.json`` for the end-of-sequence ids).

        Raises ConfigError naming whatever is missing or would need code that is not here.
        """
        path = folder / "config.json"
        return cls.from_json(read_json(path), path, read_eos_token_ids(folder))

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], path: Path, eos_token_ids: tuple[int, ...] = ()) -> ModelSpec:
        """The spec of what ``path`` holds. Raises ConfigError, see ``from_folder``."""
        try:
            return cls._from_json(raw, eos_token_ids)
        except KeyError as error:
            raise ConfigError("model", f"{path} lacks {error.args[0]!r}") from None
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError("model", f"{path} cannot be read: {error}") from None

    @classmethod
    def _from_json(cls, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelSpec:
        raw = text_config(raw)
        family = _family(raw)
        _refuse_unsupported(raw)
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        theta, scaling, share = _rope(raw, family)
        dim = int(raw.get("head_dim") or family.head_dim or hidden // heads)
        bias = bool(raw.get("attention_bias", False)) and family.reads_attention_bias
        spec = cls(
            family=family.name,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=_kv_heads(raw, family, heads),
            head_dim=dim,
            rms_norm_eps=float(raw.get("rms_norm_eps", DEFAULT_RMS_NORM_EPS)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bias or family.qkv_bias,
            attention_out_bias=bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and family.reads_mlp_bias,
            qk_norm=family.qk_norm,
            windows=_windows(raw, family),
            eos_token_ids=eos_token_ids,
            bos_token_id=None if raw.get("bos_token_id") is None else int(raw["bos_token_id"]),
            rotary_dim=None if share == 1.0 else int(dim * share),
        )
        return replace(spec, **family.read_fields(raw))


def _family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError("model", f"architecture {names} is not supported; supported: {', '.join([*FAMILIES, *WRAPPED])}")


def _kv_heads(raw: Mapping[str, Any], family: Family, heads: int) -> int:
    given = raw.get("num_key_value_heads", heads) if family.kv_heads_optional else raw["num_key_value_heads"]
    return int(given or heads)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """What would otherwise load and give wrong text, or be counted for ever."""
    if not 1 <= (layers := int(raw["num_hidden_layers"])) <= MAX_LAYERS:
        raise ConfigError("model", f"num_hidden_layers {layers} is not between 1 and {MAX_LAYERS}")
    if (dim := int(raw.get("head_dim") or 1)) > MAX_HEAD_DIM:
        raise ConfigError("model", f"head_dim {dim} is more than {MAX_HEAD_DIM}")
    if not 1 <= (longest := int(raw["max_position_embeddings"])) <= MAX_POSITIONS:
        raise ConfigError("model", f"max_position_embeddings {longest} is not between 1 and {MAX_POSITIONS}")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError("model", f"hidden_act {activation!r} is not supported (silu)")


def _rope(raw: Mapping[str, Any], family: Family) -> tuple[float, dict[str, Any] | None, float]:
    """Theta, scaling, and the share of a head that is turned.

    transformers 5 writes ``rope_parameters`` where 4 wrote ``rope_theta``, ``rope_scaling``. A scaling that somebody
    wrote beside the parameters counts, as it does there.
    """
    parameters = dict(raw.get("rope_parameters") or {})
    if isinstance(parameters.get(FULL), dict):  # a rope for each kind of layer
        parameters = dict(parameters[FULL])
    rope = dict(raw.get("rope_scaling") or parameters)

    def told(name: str) -> float | None:
        return rope.get(name) or raw.get(name) or parameters.get(name)

    theta = float(told("rope_theta") or family.rope_theta or DEFAULT_ROPE_THETA)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if kind not in family.rope_scalings:
        supported = ", ".join(family.rope_scalings)
        raise ConfigError("model", f"rope scaling {kind!r} is not supported for {family.name} ({supported})")
    share = float(told("partial_rotary_factor") or family.rotary_share)
    if share != 1.0 and not (family.rotary_share != 1.0 and 0.0 < share < 1.0):
        raise ConfigError("model", f"partial_rotary_factor {share} is not supported for {family.name} (1.0)")
    if kind == "default":
        return theta, None, share
    scaling: dict[str, Any] = {"rope_type": kind} | {name: float(rope[name]) for name in ROPE_SCALINGS[kind]}
    if kind == "yarn":
        scaling |= {name: float(rope[name]) for name in YARN_OPTIONS if rope.get(name) is not None}
        scaling |= {"truncate": bool(rope.get("truncate", True))}
    return theta, scaling, share


def _windows(raw: Mapping[str, Any], family: Family) -> tuple[int, ...]:
    """The window of each layer; () where every layer sees all."""
    window = raw.get("sliding_window")
    if family.slides is None or not window or not raw.get("use_sliding_window", family.slides):
        return ()
    if window < 1:
        raise ConfigError("model", f"sliding_window {window} is not supported: a whole number above 0")
    layers = range(int(raw["num_hidden_layers"]))
    given = raw.get("layer_types")
    kinds = [SLIDING if family.slides_at(raw, i) else FULL for i in layers] if given is None else list(given)
    if len(kinds) != len(layers) or not {*kinds} <= {SLIDING, FULL}:
        raise ConfigError("model", f"layer_types {kinds} is not supported: one of {SLIDING} and {FULL} for each layer")
    sees_all = window >= raw["max_position_embeddings"] and not family.local_rope  # with a rope of its own it stays one
    if sees_all or SLIDING not in kinds:
        return ()
    return tuple(int(window) if kind == SLIDING else 0 for kind in kinds)
