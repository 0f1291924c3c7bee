"""What a GGUF file says of DeepSeek's latent attention, as the config.json of a Hugging Face folder says it, and the
projection that llama.cpp writes in two parts.

Files since April 2025 have ``attn_k_b`` and ``attn_v_b``, and the widths of a head in fields that end in ``_mla``.
Those before have ``attn_kv_b`` as the checkpoint has it, and the widths in the fields that other architectures have.
"""

from __future__ import annotations

from typing import Any

import torch

from paceline.models.gguf.fields import Fields

LATENT = ("deepseek2",)  # architectures with latent attention
TIMES = 0.1  # llama.cpp's converter multiplies yarn's mscale_all_dim by it
Shape = tuple[int, ...]


def rope_width(fields: Fields) -> int:
    """Elements of a head that rope turns. Raises ConfigError for none, or an odd number."""
    if (width := fields.whole("rope.dimension_count")) % 2:
        raise fields.refused(f"{fields.architecture}.rope.dimension_count is {width}, expected an even number")
    return width


def latent_config(fields: Fields) -> dict[str, Any]:
    """Fields of config.json. Raises ConfigError for widths that are missing or do not fit each other, and for queries
    that are scaled by their position."""
    if fields.get("attention.temperature_scale"):
        raise fields.refused(f"{fields.architecture}.attention.temperature_scale is not supported")
    query, value = _head_widths(fields)
    if query <= (rope := rope_width(fields)):
        raise fields.refused(f"heads of {query} elements, of which rope turns {rope}, are not supported")
    return {
        "num_key_value_heads": fields.whole("attention.head_count"),
        "q_lora_rank": fields.count("attention.q_lora_rank") or None,
        "kv_lora_rank": fields.whole("attention.kv_lora_rank"),
        "qk_nope_head_dim": query - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rope_interleave": True,  # the converter leaves the rows of rope as they are
    }


def _head_widths(fields: Fields) -> tuple[int, int]:
    """Widths of a head's query and of its value. Where fields end in ``_mla``, the others have those of a latent."""
    end = "" if fields.get("attention.key_length_mla") is None else "_mla"
    return fields.whole(f"attention.key_length{end}"), fields.whole(f"attention.value_length{end}")


def sharpness(fields: Fields) -> dict[str, float]:
    """How yarn sharpens attention; nothing where the file does not say. Raises ConfigError for no number.

    The rope itself keeps its length: DeepSeek's configs have one number for ``mscale`` and ``mscale_all_dim``, of
    which the file has the second.
    """
    share = round(fields.number("rope.scaling.yarn_log_multiplier", 0.0) / TIMES, 6)
    return {"mscale": share, "mscale_all_dim": share} if share else {}


def part_shapes(fields: Fields) -> tuple[Shape, Shape]:
    """Shapes of ``attn_k_b`` [heads, latent, key] and ``attn_v_b`` [heads, value, latent]. Raises ConfigError, see
    latent_config."""
    config = latent_config(fields)
    heads, rank = config["num_key_value_heads"], config["kv_lora_rank"]
    return (heads, rank, config["qk_nope_head_dim"]), (heads, config["v_head_dim"], rank)


def joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The whole projection: of each head the rows of its key, then those of its value; float32 [heads * (key + value),
    latent]. For the shapes see part_shapes."""
    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
