"""What a DeepSeek-V3 ``config.json`` says beyond the Llama fields: latent attention and MTP. No torch here."""

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


def read_mtp_modules(raw: Mapping[str, Any]) -> int:
    """How many MTP modules the checkpoint may carry. Raises ConfigError for more than are supported."""
    count = int(raw.get("num_nextn_predict_layers") or 0)
    if not 0 <= count <= MAX_MTP_MODULES:
        raise ConfigError("model", f"num_nextn_predict_layers {count} is not between 0 and {MAX_MTP_MODULES}")
    return count
