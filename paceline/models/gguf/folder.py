"""A GGUF file as a model folder: its configs and tokenizer are written once beside links to it, one for each part where
it was split; weights stay in it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.layers.build import cache_folder
from paceline.model_files import publish_folder
from paceline.models.gguf.convert import FROM_BESIDE, write_configs
from paceline.models.gguf.file import GgufFile
from paceline.models.weight_files import gguf_parts, part_name

LINK = "model"  # and .gguf, or what part it is
CONFIGS = 3  # counts up when other configs are written: a folder of another number is made anew


def as_folder(file: Path, beside: Path | None, progress: Callable[[str, float], None]) -> Path:
    """The folder of a file, made where there is none for the file as it is now.

    beside: see ``write_configs``. Raises ConfigError where the file cannot be read, or the folder not be written.
    """
    named = gguf_parts(file)
    try:
        sources = [part.resolve() for part in named]
        target = cache_folder() / "gguf" / _name(sources, beside)
    except OSError as error:
        raise ConfigError("model", f"{file} cannot be read: {error}") from error
    if (target / "config.json").is_file():
        return target
    progress("reading GGUF", 0.0)
    opened = GgufFile(named[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.tmp-") as scratch:
            folder = Path(scratch) / "folder"
            folder.mkdir()
            write_configs(opened, folder, beside)
            for i, source in enumerate(sources):
                link = part_name(LINK, i, len(sources)) if len(sources) > 1 else f"{LINK}.gguf"
                (folder / link).symlink_to(source)
            publish_folder(folder, target, target / "config.json")
    except OSError as error:
        raise ConfigError("model", f"{target} could not be made: {error}") from error
    progress("reading GGUF", 1.0)
    return target


def _name(sources: list[Path], beside: Path | None) -> str:
    """A folder's name: where its parts are, then what is written, of which state of the file and of what lies
    beside it. sources: its parts."""
    files = [*sources, *(beside / name for name in FROM_BESIDE if beside is not None and (beside / name).is_file())]
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    where = hashlib.blake2b(f"{sources[0]}\0{beside}".encode(), digest_size=8).hexdigest()
    what = hashlib.blake2b(repr((CONFIGS, states)).encode(), digest_size=8).hexdigest()
    return f"{where}-{what}"
