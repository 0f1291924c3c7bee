"""What ``default`` and ``auto`` stand for: the heads that were given, that ship, or that the model brings along.

The router asks too, so nothing here needs torch, unless there are heads that must be looked into.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paceline.config import EngineConfig
from paceline.spec_decode.heads.shipped import own_modules, shipped_heads
from paceline.speculation import AUTO, DEFAULT, DRAFTERS

DEFAULT_HEADS = ("eagle3",)  # of the heads that ship, those that ``default`` takes; ``auto`` takes any
Config = TypeVar("Config", bound=EngineConfig)


def with_real_drafter(config: Config) -> Config:
    """``config`` with ``default`` replaced by the drafter it stands for here, so that everyone calls it by one name.

    Raises ConfigError when the heads of ``drafter_path`` cannot be told.
    """
    return config.model_copy(update={"drafter": resolve_drafter(config)}) if config.drafter == DEFAULT else config


def resolve_drafter(config: EngineConfig) -> str:
    """The drafter that has the deployment's heads: ``default`` and ``auto`` are decided by what there is."""
    if config.drafter not in (DEFAULT, AUTO):
        return config.drafter
    if config.drafter_path:
        return _kind_of(Path(config.drafter_path))
    wanted = DRAFTERS if config.drafter == AUTO else DEFAULT_HEADS
    found = next((name for name in wanted if shipped_heads(config.model, name)), None)
    return found or ("mtp" if own_modules(config.model) else "ngram")


def _kind_of(folder: Path) -> str:
    """The drafter for the heads in a folder. Raises ConfigError."""
    from paceline.spec_decode.heads.detect import detect  # imports torch

    name = detect(folder).partition("-")[0]
    return "eagle" if name == "eagle1" else name
