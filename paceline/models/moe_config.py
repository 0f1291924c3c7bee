"""What a ``config.json`` says about experts. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

MAX_EXPERTS = 1 << 14  # of a layer


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
    softmax: bool = False  # scores are a softmax of all logits, not the sigmoid of each
    correction_bias: bool = True  # a bias of the scores takes part in the choice
    dense_layers: tuple[int, ...] = ()  # dense ones after ``first_layer``
    shared_by: int = 1  # ranks that each have a part of the shared experts' width

    @property
    def shared_width(self) -> int:
        """Width of the shared experts' MLP, on one rank."""
        return self.num_shared_experts * self.intermediate_size // self.shared_by

    def is_dense(self, layer: int) -> bool:
        """Whether ``layer`` has one MLP and no experts. An MTP module is a layer after the last."""
        return layer < self.first_layer or layer in self.dense_layers


def read_grouped_moe(raw: Mapping[str, Any]) -> MoeSpec:
    """Sigmoid scores in groups: DeepSeek-V3 and GLM-4.5.

    Raises KeyError for a missing number, ConfigError for a routing that is not here.
    """
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
    if moe.num_experts > MAX_EXPERTS:
        raise ConfigError("model", f"n_routed_experts {moe.num_experts} is more than {MAX_EXPERTS}")
    size = moe.num_experts // moe.num_groups
    if size < 2:
        raise ConfigError("model", f"n_group {moe.num_groups} leaves fewer than 2 of {moe.num_experts} experts a group")
    if not 1 <= moe.top_groups <= moe.num_groups:
        raise ConfigError("model", f"topk_group {moe.top_groups} is not between 1 and n_group {moe.num_groups}")
    if not 1 <= moe.top_k <= moe.top_groups * size:
        raise ConfigError("model", f"num_experts_per_tok {moe.top_k} exceeds the experts of {moe.top_groups} groups")


def softmax_moe(num_experts: int, top_k: int, intermediate_size: int, normalise: bool) -> MoeSpec:
    """Softmax scores without groups, bias or shared experts. Raises ConfigError for numbers that do not fit."""
    if not 2 <= num_experts <= MAX_EXPERTS or not 1 <= top_k <= num_experts:
        raise ConfigError("model", f"num_experts_per_tok {top_k} does not fit {num_experts} experts")
    return MoeSpec(0, num_experts, 0, intermediate_size, top_k, 1, 1, normalise, 1.0, True, False)


def dense_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers of Qwen3-MoE that are dense: those that ``mlp_only_layers`` names, and those that ``decoder_sparse_step``
    passes over."""
    step = int(raw.get("decoder_sparse_step") or 1)
    named = {int(layer) for layer in raw.get("mlp_only_layers") or ()}
    return tuple(i for i in range(int(raw["num_hidden_layers"])) if i in named or (i + 1) % step)
