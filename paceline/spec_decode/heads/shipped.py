"""The draft heads that need no ``drafter_path``: those that come with Paceline, and MTP modules in the target's own
checkpoint. The router asks too: torch is imported only for a model whose config.json promises modules."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError
from paceline.model_files import MADE_FROM, quantization_config, read_json

SHIPPED = Path(__file__).resolve().parents[3] / "heads"  # beside the packages: folders by model, then by drafter


def shipped_heads(model: str, drafter: str) -> Path | None:
    """The folder of the heads that come with Paceline for a model, or for the one that it is a quantised copy of, if
    there are any."""
    for name in (Path(model).name, _made_from(Path(model))):
        folder = SHIPPED / name / drafter
        if name and (folder / "config.json").is_file():
            return folder
    return None


def _made_from(folder: Path) -> str:
    """Name of the model that a folder of ``paceline quantize`` was made from; else empty."""
    try:
        raw = read_json(folder.expanduser() / "config.json")
        found = raw.get(MADE_FROM) if quantization_config(raw) is not None else None
    except (ConfigError, OSError):
        return ""
    return Path(found).name if isinstance(found, str) else ""


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
