"""The heads that come with Paceline, and what ``default`` and ``auto`` stand for where they are or are not.

The router asks too, so nothing here needs torch, unless a folder of heads was given and must be looked into.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paceline.config import EngineConfig

SHIPPED = Path(__file__).resolve().parents[2] / "heads"  # beside the packages: folders by model, then by drafter
HEADS_FOR_AUTO = ("eagle3", "mtp", "eagle", "medusa")  # order of preference (algorithms.md L1)
Config = TypeVar("Config", bound=EngineConfig)


def shipped_heads(model: str, drafter: str) -> Path | None:
    """The folder of the heads that come with Paceline for a model, if there are any."""
    folder = SHIPPED / Path(model).name / drafter
    return folder if (folder / "config.json").is_file() else None


def with_real_drafter(config: Config) -> Config:
    """``config`` with ``default`` replaced by the drafter it stands for here, so that everyone calls it by one name.

    Raises ConfigError when the heads of ``drafter_path`` cannot be told.
    """
    return config.model_copy(update={"drafter": resolve_drafter(config)}) if config.drafter == "default" else config


def resolve_drafter(config: EngineConfig) -> str:
    """The drafter that has the deployment's heads: ``default`` and ``auto`` are decided by what there is."""
    if config.drafter not in ("default", "auto"):
        return config.drafter
    if config.drafter_path:
        return _kind_of(Path(config.drafter_path))
    wanted = HEADS_FOR_AUTO if config.drafter == "auto" else ("eagle3",)
    return next((name for name in wanted if shipped_heads(config.model, name)), "ngram")


def _kind_of(folder: Path) -> str:
    """The drafter for the heads in a folder. Raises ConfigError."""
    from paceline.spec_decode.heads.detect import detect  # imports torch

    name = detect(folder).partition("-")[0]
    return "eagle" if name == "eagle1" else name
