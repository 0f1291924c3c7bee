"""What a DeepSeek-V3 ``config.json`` says beyond the Llama fields: latent attention, experts, MTP. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

MAX_MTP_MODULES = 8


@dataclass(frozen=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). Widths in elements."""

    q_lora_rank: int | None  # None: queries are projected at once
    kv_lora_rank: int  # of the latent that is cached
    nope_dim: int  # of a head's query and key, without rope
    rope_dim: int  # of a head's query, and of the key shared by all heads
    value_dim: int  # of a head
    rope_interleave: bool  # checkpoint's rope pairs lie side by side; converted to halves when loaded

    @property
    def query_dim(self) -> int:
        """Width of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Elements cached for a token in a layer."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class MoeSpec:
    """Experts of the layers from ``first_layer`` on; the layers before are dense."""

    first_layer: int
    num_experts: int
    num_shared_experts: int  # run for every token, as one expert of their joint width
    intermediate_size: int  # of one expert
    top_k: int
    num_groups: int
    top_groups: int
    normalise: bool
    factor: float  # of the routed experts' sum


def read_mla(raw: Mapping[str, Any]) -> MlaSpec:
    """Raises KeyError for a missing number."""
    rank = raw["q_lora_rank"]
    return MlaSpec(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(raw["kv_lora_rank"]),
        nope_dim=int(raw["qk_nope_head_dim"]),
        rope_dim=int(raw["qk_rope_head_dim"]),
        value_dim=int(raw["v_head_dim"]),
        rope_interleave=bool(raw.get("rope_interleave", True)),
    )


def read_moe(raw: Mapping[str, Any]) -> MoeSpec:
    """Raises KeyError for a missing number, ConfigError for a routing that is not here."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        if (value := raw.get(key, only)) != only:
            raise ConfigError("model", f"{key} {value!r} is not supported ({only!r})")
    spec = MoeSpec(
        first_layer=int(raw["first_k_dense_replace"]),
        num_experts=int(raw["n_routed_experts"]),
        num_shared_experts=int(raw.get("n_shared_experts") or 0),
        intermediate_size=int(raw["moe_intermediate_size"]),
        top_k=int(raw["num_experts_per_tok"]),
        num_groups=int(raw["n_group"]),
        top_groups=int(raw["topk_group"]),
        normalise=bool(raw["norm_topk_prob"]),
        factor=float(raw["routed_scaling_factor"]),
    )
    _check_groups(spec)
    return spec


def _check_groups(moe: MoeSpec) -> None:
    if moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        raise ConfigError("model", f"n_group {moe.num_groups} does not divide n_routed_experts {moe.num_experts}")
    size = moe.num_experts // moe.num_groups
    if size < 2:
        raise ConfigError("model", f"n_group {moe.num_groups} leaves fewer than 2 of {moe.num_experts} experts a group")
    if not 1 <= moe.top_groups <= moe.num_groups:
        raise ConfigError("model", f"topk_group {moe.top_groups} is not between 1 and n_group {moe.num_groups}")
    if not 1 <= moe.top_k <= moe.top_groups * size:
        raise ConfigError("model", f"num_experts_per_tok {moe.top_k} exceeds the experts of {moe.top_groups} groups")


def read_mtp_modules(raw: Mapping[str, Any]) -> int:
    """How many MTP modules the checkpoint may carry. Raises ConfigError for more than are supported."""
    count = int(raw.get("num_nextn_predict_layers") or 0)
    if not 0 <= count <= MAX_MTP_MODULES:
        raise ConfigError("model", f"num_nextn_predict_layers {count} is not between 0 and {MAX_MTP_MODULES}")
    return count
