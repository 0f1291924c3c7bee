"""What ``default`` and ``auto`` stand for: the heads that were given, that ship, or that the model brings along.

The router asks too, so nothing here needs torch, unless there are heads that must be looked into.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from paceline.engine_config import EngineConfig
from paceline.spec_decode.heads.shipped import own_modules, shipped_heads
from paceline.speculation import AUTO, DEFAULT, DRAFTERS, is_weightless

AUTO_TOKENS = 8  # K of ``auto`` where none is asked for: its drafters choose their own length below it
Config = TypeVar("Config", bound=EngineConfig)


def with_real_drafter(config: Config) -> Config:
    """``config`` with ``default`` replaced by the drafter it stands for here, so that everyone calls it by one name,
    and with the draft length of ``auto`` where none is asked for.

    ``default`` is ``auto`` where there are heads: it drafts with them only as far as that pays on this host. Without
    heads it is ngram. Raises ConfigError when the heads of ``drafter_path`` cannot be told.
    """
    update: dict[str, object] = {}
    name = config.drafter
    if name == DEFAULT:
        found = resolve_drafter(config)
        name = update["drafter"] = found if is_weightless(found) else AUTO
    if name == AUTO and "num_draft_tokens" not in config.model_fields_set:
        update["num_draft_tokens"] = AUTO_TOKENS
    return config.model_copy(update=update)


def resolve_drafter(config: EngineConfig) -> str:
    """The drafter that has the deployment's heads: ``default`` and ``auto`` are decided by what there is."""
    if config.drafter not in (DEFAULT, AUTO):
        return config.drafter
    if config.drafter_path:
        return _kind_of(Path(config.drafter_path))
    found = next((name for name in DRAFTERS if shipped_heads(config.model, name)), None)
    return found or ("mtp" if own_modules(config.model) else "ngram")


def _kind_of(folder: Path) -> str:
    """The drafter for the heads in a folder. Raises ConfigError."""
    from paceline.spec_decode.heads.detect import detect  # imports torch

    name = detect(folder).partition("-")[0]
    return "eagle" if name == "eagle1" else name
