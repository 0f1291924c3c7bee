"""What a GGUF file says about experts, as the config.json of a Hugging Face folder says it."""

from __future__ import annotations

from typing import Any

from paceline.models.gguf.fields import Fields
from paceline.models.gguf.latent import LATENT

Allowed = dict[str, tuple[float, ...]]  # what a field may say of how rows choose their experts
GROUPED = ("glm4moe", "deepseek2")  # a sigmoid for each expert, in groups, beside shared experts and dense first layers
SIGMOID: Allowed = {"expert_gating_func": (0, 2), "moe_every_n_layers": (0, 1)}
V3_SHAPE, V3_GROUPS = (61, 256), (8, 4)  # layers and experts of a DeepSeek-V3; groups, and how many a row chooses from
SOFTMAX: Allowed = {  # over all of them: no groups, none that always run
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "nextn_predict_layers": (0,),
}


def expert_config(fields: Fields) -> dict[str, Any]:
    """Fields of config.json. Raises ConfigError for counts that do not fit each other, and for another routing."""
    if fields.architecture in LATENT and (value := fields.get("expert_gating_func")) != 2:
        supported = "2, a sigmoid for each expert; DeepSeek-V2 has a softmax"
        raise fields.refused(f"{fields.architecture}.expert_gating_func {value!r} is not supported ({supported})")
    for name, allowed in (SIGMOID if fields.architecture in GROUPED else SOFTMAX).items():
        if (value := fields.get(name)) is not None and value not in allowed:
            raise fields.refused(f"{fields.architecture}.{name} {value!r} is not supported")
    count, used = fields.expert_count(), fields.whole("expert_used_count")
    if used > count:
        raise fields.refused(f"{fields.architecture}.expert_used_count is {used} of {count} experts")
    wide = fields.whole("expert_feed_forward_length")
    if fields.architecture == "gpt-oss":
        return {"num_local_experts": count, "num_experts_per_tok": used, "intermediate_size": wide} | _windows(fields)
    named = {"num_experts_per_tok": used, "moe_intermediate_size": wide}
    if fields.architecture in GROUPED:
        return named | {"n_routed_experts": count} | _grouped(fields)
    return named | {
        "num_experts": count,
        "norm_topk_prob": fields.get("expert_weights_norm") is not False,  # files of the family do not say it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _grouped(fields: Fields) -> dict[str, Any]:
    """The rest of a family of GROUPED. A file that does not say whether weights sum to one has them as they are."""
    groups, chosen = _groups(fields)
    return {
        "n_shared_experts": fields.count("expert_shared_count"),
        "n_group": groups,
        "topk_group": chosen,
        "norm_topk_prob": fields.get("expert_weights_norm") is True,
        "routed_scaling_factor": float(fields.number("expert_weights_scale", 1.0)) or 1.0,
        "first_k_dense_replace": fields.count("leading_dense_block_count"),
    }


def _groups(fields: Fields) -> tuple[int, int]:
    """Groups of the experts, and how many of them a row may choose from. Files that were written before llama.cpp had
    groups do not say: a DeepSeek-V3 is known by its shape."""
    v3 = fields.architecture in LATENT and (fields.num_layers(), fields.expert_count()) == V3_SHAPE
    if v3 and fields.get("expert_group_count") is None:
        return V3_GROUPS
    return fields.count("expert_group_count") or 1, fields.count("expert_group_used_count") or 1


def _windows(fields: Fields) -> dict[str, Any]:
    """The rest of a gpt-oss: a window in every second layer, the first one included, and biases."""
    if (pattern := fields.get("attention.sliding_window_pattern")) not in (None, 2):
        raise fields.refused(f"{fields.architecture}.attention.sliding_window_pattern {pattern!r} is not supported (2)")
    return {"sliding_window": fields.whole("attention.sliding_window"), "attention_bias": True}
