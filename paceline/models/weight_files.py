"""Which files of a folder have a model's weights. No torch here: routers ask too."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError
from paceline.model_files import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: those that the index names, or ``model.safetensors``, or all."""
    if (folder / INDEX_FILE).is_file():
        names = _indexed_files(folder / INDEX_FILE)
    elif (folder / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]  # some repositories keep a second copy in another format beside it
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ConfigError("model", f"{folder} lacks {', '.join(missing) or 'safetensors files'}")
    return [folder / name for name in names]


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors. Raises ConfigError where there are several."""
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise ConfigError("model", f"{folder} has {len(found)} GGUF files ({names}): give the path of one of them")
    return found[0] if found else None


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError("model", f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError("model", f"{index} names files outside its folder: {', '.join(outside)}")
    return names
