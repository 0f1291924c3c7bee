"""The draft heads that need no ``drafter_path``: those that come with Paceline, and MTP modules in the target's own
checkpoint. The router asks too: torch is imported only for a model whose config.json promises modules."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError

SHIPPED = Path(__file__).resolve().parents[3] / "heads"  # beside the packages: folders by model, then by drafter


def shipped_heads(model: str, drafter: str) -> Path | None:
    """The folder of the heads that come with Paceline for a model, if there are any."""
    folder = SHIPPED / Path(model).name / drafter
    return folder if (folder / "config.json").is_file() else None


def own_modules(model: str) -> Path | None:
    """The model's own folder where it holds MTP modules. Fetches a hub's model that is not here yet.

    None also where the model is not to be had or not known: whoever loads it says what is wrong.
    """
    from paceline.models.hub import resolve_model  # imports torch

    try:
        folder = resolve_model(model)
        if "num_nextn_predict_layers" not in (folder / "config.json").read_text(encoding="utf-8"):
            return None
        from paceline.models.config import ModelSpec
        from paceline.models.registry import holds_mtp

        return folder if holds_mtp(folder, ModelSpec.from_folder(folder)) else None
    except (ConfigError, OSError):
        return None
