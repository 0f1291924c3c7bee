"""A model folder whose tokenizer is Mistral's tekken.json, as one with a tokenizer.json: it is written once, beside
links to all that the folder has."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ConfigError
from paceline.layers.build import cache_folder
from paceline.model_files import publish_folder, read_json
from paceline.text.tekken import TEKKEN, read_tekken, tekken_tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
FORM = 1  # counts up when other files are written: a folder of another number is made anew


def with_tokenizer(folder: Path, progress: Callable[[str, float], None]) -> Path:
    """A folder with the tokenizer of ``folder``, which has a tekken.json, and with links to all that is in it.

    It is named by what it is made from, and made where there is none. Links are made and removed at each call, as
    ``folder`` is then. Raises ConfigError where the tokenizer cannot be made, or the folder not be written.
    """
    content, settings = read_tekken(folder / TEKKEN), folder / SETTINGS
    try:
        source = folder.resolve()
        own = settings.read_bytes() if settings.is_file() else b""
        where = hashlib.blake2b(str(source).encode(), digest_size=8).hexdigest()
        what = hashlib.blake2b(f"{FORM} {len(own)} ".encode() + own + content, digest_size=8).hexdigest()
        target = cache_folder() / "tekken" / f"{where}-{what}"
        made = target / source.name
        if not (made / TOKENIZER).is_file():
            progress("reading tekken.json", 0.0)
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.tmp-") as scratch:
                half = Path(scratch) / "folder" / source.name
                half.mkdir(parents=True)
                _write(folder, content, half)
                _link(source, half)
                publish_folder(half.parent, target, made / TOKENIZER)
            progress("reading tekken.json", 1.0)
        _link(source, made)
    except OSError as error:
        raise ConfigError("model", f"the tokenizer of {folder} could not be written: {error}") from error
    return made


def _write(folder: Path, content: bytes, made: Path) -> None:
    """The tokenizer and its settings; those that ``folder`` has go first."""
    tokenizer, settings = tekken_tokenizer(content, folder / TEKKEN)
    own = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    settings |= {key: value for key, value in own.items() if value is not None}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # which reads a tokenizer.json
    tokenizer.save(str(made / TOKENIZER), pretty=False)
    (made / SETTINGS).write_text(json.dumps(settings, ensure_ascii=False) + "\n", encoding="utf-8")


def _link(source: Path, made: Path) -> None:
    """Links to all that ``source`` has, and to nothing else. Another process may do the same meanwhile."""
    for entry in source.iterdir():
        link = made / entry.name
        if entry.name not in (TOKENIZER, SETTINGS) and not entry.name.startswith(".") and not link.is_symlink():
            try:
                link.symlink_to(entry)
            except FileExistsError:
                continue
    for link in made.iterdir():
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
