"""What a model cannot have of the options of its nodes, told before anything is started or loaded."""

from __future__ import annotations

from paceline.config import ServeConfig
from paceline.errors import ConfigError, InvalidRequest
from paceline.models.config import ModelSpec
from paceline.ranks.degrees import check_ranks
from paceline.role_options import ROLES, Role


def check_roles(config: ServeConfig) -> None:
    """Raise ConfigError naming the role's option, with the numbers, for ranks that the model cannot be dealt to and for
    prefill nodes that hold less than decode nodes take. Blocks; reads the model's config.json."""
    if config.tp == config.attention_dp == 1 and not config.prefill.given() and not config.decode.given():
        return
    from paceline.models.hub import resolve_model

    check_spec(config, ModelSpec.from_folder(resolve_model(config.model)))


def check_prefill_may_come(config: ServeConfig) -> None:
    """Raise InvalidRequest where a prefill node could not serve beside the decode nodes. A deployment that starts
    without prefill nodes has not looked at that. Blocks."""
    if config.prefill_nodes:
        return
    try:
        config.check_roles_agree()
        check_roles(config.model_copy(update={"prefill_nodes": 1}))
    except (ValueError, ConfigError) as problem:
        raise InvalidRequest("role", f"the options of this deployment allow no prefill node: {problem}") from None


def check_spec(config: ServeConfig, spec: ModelSpec) -> None:
    """The same for a model that was read."""
    for role in roles_of(config):
        try:
            check_ranks(config.of_role(role), spec)
        except ConfigError as error:
            key = f"{role}_{error.key}" if getattr(getattr(config, role), error.key) else error.key
            raise ConfigError(key, error.message) from None
    if config.prefill_nodes:
        _check_memory(config, spec)


def roles_of(config: ServeConfig) -> tuple[Role, ...]:
    """Those that the deployment has nodes of."""
    return ROLES if config.prefill_nodes else ("decode",)


def _check_memory(config: ServeConfig, spec: ModelSpec) -> None:
    """Routers take what decode nodes take. A prefill node that holds less would refuse it."""
    holds, takes = (config.of_role(role).kv_cache_tokens for role in ROLES)
    longest = (config.max_model_len or spec.max_model_len) + config.nodes_budget
    if holds < min(takes, longest):
        raise ConfigError(
            "prefill_kv_cache_tokens",
            f"prefill nodes hold {holds} tokens and decode nodes {takes}: a request of {min(takes, longest)} tokens, "
            f"prompt, output and draft, must fit both",
        )
