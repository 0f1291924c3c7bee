"""From options to a drafter, in two steps: its KV layers first, since they are part of the pool, then itself.

Every drafter's module has a function of type ``PlanDrafter`` that its record (paceline/speculation.py) names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from paceline.attention.base import AttentionBackend
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget, Drafter
from paceline.spec_decode.heads.shipped import shipped_heads
from paceline.speculation import TreeKind

Make = Callable[[KvPool, AttentionBackend], Drafter]


@dataclass(frozen=True)
class DrafterPlan:
    """A drafter about to be: what it adds to the pool, what a peer must match, how to make it."""

    kv_layers: tuple[KvLayer, ...]
    digest: str
    make: Make


PlanDrafter = Callable[[str, EngineConfig, TargetModel], DrafterPlan]  # name, options; raises ConfigError


def load_planner(place: str) -> PlanDrafter:
    """The function at "module:function", whose module is imported now."""
    module, _, function = place.partition(":")
    return cast(PlanDrafter, getattr(import_module(module, __package__), function))


def plan_weightless(drafter: Drafter) -> DrafterPlan:
    """The plan of a drafter that needs nothing but the tokens."""
    return DrafterPlan((), "", lambda kv, attention: drafter)


def budget_of(config: EngineConfig) -> DraftBudget:
    """The largest tree of a deployment."""
    width = 1 if config.tree is TreeKind.CHAIN else config.tree_width
    return DraftBudget(config.num_draft_tokens, width, config.tree, config.nodes_budget, config.min_confidence)


def heads_folder(name: str, config: EngineConfig) -> Path:
    """The folder given, or that of the heads that ship for the model. Raises ConfigError where there is neither."""
    if config.drafter_path:
        return Path(config.drafter_path)
    found = shipped_heads(config.model, name)
    if found is None:
        raise ConfigError("drafter_path", f"no {name} heads ship for {config.model}: give their folder")
    return found
