"""Which numbers of ranks a model can have. No torch here."""

from __future__ import annotations

from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.models.config import ModelSpec
from paceline.parallel.slabs import slabs_of, sum_slabs

VOCAB_BLOCK = 32  # rows of the vocabulary that stay together
MOST_RANKS = 64
TOGETHER = 16  # query heads of a KV head that AMX takes; more are computed in another order (kernels/attention.h)
DENSE, SHARED = "mlp", "mlp.shared_experts"  # of layers without experts; beside experts


def degrees(spec: ModelSpec) -> tuple[int, ...]:
    """The numbers of ranks that a model can have, in ascending order."""
    return tuple(degree for degree in range(1, MOST_RANKS + 1) if _fits(spec, degree))


def check_degree(degree: int, spec: ModelSpec) -> None:
    """Raise ConfigError naming ``tp`` where a model cannot have ``degree`` ranks."""
    if not _fits(spec, degree):
        slabs, fitting = sum_slabs(spec.num_heads), ", ".join(map(str, degrees(spec)))
        counts = [f"{spec.num_heads} heads"]
        if spec.mla is None:
            counts.append(f"{spec.num_kv_heads} KV heads")
        if spec.moe is not None:
            counts.append(f"{spec.moe.num_experts} experts")
        widths = " and ".join(map(str, widths_of_ranks(spec)))
        raise ConfigError(
            "tp",
            f"{degree} ranks do not fit a model of {', '.join(counts)}, {slabs} slabs and sums over {widths} elements: "
            f"it can have {fitting}",
        )


def check_pools(pools: int, ranks: int, spec: ModelSpec) -> None:
    """Raise ConfigError naming ``attention_dp`` where the ranks of a node cannot have ``pools`` pools."""
    if pools == 1:
        return
    asked = f"{pools} pools are asked for"
    if pools != ranks:
        raise ConfigError("attention_dp", f"{asked}, but {ranks} ranks (tp) can have 1 or {ranks}")
    if spec.mla is None:
        raise ConfigError("attention_dp", f"{asked}, but {spec.family} has KV heads, which ranks share: it can have 1")


def check_ranks(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError naming ``tp`` or ``attention_dp`` for what nodes of several ranks cannot serve, before anything
    is loaded. Whether ranks part the groups of a quantised checkpoint is seen when it is read."""
    check_pools(config.attention_dp, config.tp, spec)
    if config.attention_dp > 1 and config.device != "cpu":
        raise ConfigError(
            "attention_dp",
            f"{config.attention_dp} pools are asked for, but on {config.device} a node has 1: only CPUs deal sequences",
        )
    if config.tp == 1:
        return
    asked = f"{config.tp} ranks are asked for, but "
    check_degree(config.tp, spec)
    if config.quantize != "none":
        _check_groups(config.quantize, spec, asked)


def _check_groups(scheme: str, spec: ModelSpec, asked: str) -> None:
    from paceline.models.quantization.round_to_nearest import group_of_scheme

    slabs, group = sum_slabs(spec.num_heads), group_of_scheme(scheme)
    for width in widths_of_ranks(spec):
        if slabs_of(width, slabs, group) != slabs:
            raise ConfigError(
                "tp",
                f"{asked}with quantize {scheme} the model can have 1: {width} columns are not {slabs} slabs of whole "
                f"groups of {group}",
            )


def _fits(spec: ModelSpec, degree: int) -> bool:
    if degree < 1:
        return False
    slabs, moe = sum_slabs(spec.num_heads), spec.moe
    whole = all(slabs_of(width, slabs) == slabs for width in widths_of_ranks(spec))
    dealt = slabs % degree == 0 and (moe is None or moe.num_experts % degree == 0)
    if spec.mla is None:
        dealt = dealt and (spec.num_kv_heads % degree == 0 or degree % spec.num_kv_heads == 0)
        dealt = dealt and _keeps_order(spec, degree)
    return degree == 1 or (whole and dealt and vocab_blocks(spec.vocab_size) >= degree)


def mlps_of_ranks(spec: ModelSpec) -> frozenset[str]:
    """The MLPs whose width ranks share. In a family with experts, rank 0 has one alone whose width does not make the
    model's slabs: most of the weights are experts."""
    slabs, moe = sum_slabs(spec.num_heads), spec.moe
    if moe is None:
        return frozenset((DENSE,))
    widths = {DENSE: spec.intermediate_size, SHARED: moe.num_shared_experts * moe.intermediate_size}
    return frozenset(name for name, width in widths.items() if slabs_of(width, slabs) == slabs)


def widths_of_ranks(spec: ModelSpec) -> list[int]:
    """Elements that the products add whose sums the ranks share: of attention, of dense layers, of shared experts."""
    moe, value, shared = spec.moe, spec.head_dim if spec.mla is None else spec.mla.value_dim, mlps_of_ranks(spec)
    widths = [spec.num_heads * value]
    if DENSE in shared and (moe is None or any(map(moe.is_dense, range(spec.num_layers)))):
        widths.append(spec.intermediate_size)
    if SHARED in shared and moe is not None and moe.num_shared_experts:
        widths.append(moe.num_shared_experts * moe.intermediate_size)
    return widths


def _keeps_order(spec: ModelSpec, degree: int) -> bool:
    """Whether a rank's attention adds in the order of the whole model's. Ranks that share a KV head have fewer query
    heads of it."""
    group = spec.num_heads // spec.num_kv_heads
    return group <= TOGETHER or group // max(1, degree // spec.num_kv_heads) > TOGETHER


def vocab_blocks(size: int) -> int:
    """Blocks of rows of a vocabulary that ranks may part."""
    return -(-size // VOCAB_BLOCK)
