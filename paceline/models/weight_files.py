"""Which files of a folder have a model's weights. No torch here: routers ask too."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.errors import ConfigError
from paceline.model_files import read_json

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)  # of a split GGUF file, as llama.cpp names it
MAX_PARTS = 1 << 10


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
    """The GGUF file of a folder without safetensors, or the first part of the one that was split. Raises ConfigError
    where there are several, and where parts are missing."""
    if any(folder.glob("*.safetensors")) or (folder / INDEX_FILE).is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    sets = {(part[1], part[3]) if (part := PART.fullmatch(file.name)) else file.name for file in found}
    if len(sets) > 1:
        names = ", ".join(file.name for file in found[:5])
        raise ConfigError("model", f"{folder} has {len(found)} GGUF files ({names}): give the path of one of them")
    return gguf_parts(found[0])[0] if found else None


def gguf_parts(file: Path) -> list[Path]:
    """All parts of the set that a file is one of by its name, in their order; of any other name, the file itself.

    Raises ConfigError for a set with missing parts, or of more than MAX_PARTS.
    """
    if (part := PART.fullmatch(file.name)) is None:
        return [file]
    stem, number, count = part[1], int(part[2]), int(part[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise ConfigError("model", f"{file.name} is part {number} of {count}, expected 1 to {MAX_PARTS} parts")
    parts = [file.with_name(part_name(stem, i, count)) for i in range(count)]
    if missing := [path.name for path in parts if not path.is_file()]:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ConfigError("model", f"{file.parent} lacks {', '.join(missing[:5])}{more} of the {count} parts of {stem}")
    return parts


def part_name(stem: str, index: int, count: int) -> str:
    """The name of a part. index: from 0 on."""
    return f"{stem}-{index + 1:05d}-of-{count:05d}.gguf"


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError("model", f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError("model", f"{index} names files outside its folder: {', '.join(outside)}")
    return names
