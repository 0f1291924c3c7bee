"""The JSON files of a Hugging Face model folder that more than one part reads, and how a folder that is made of other
files comes to its place."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError

MADE_FROM = "_name_or_path"  # of config.json, as transformers has it: the model that a folder was made from
QUANTISED = ("quantization_config", "compression_config")  # sections of config.json; the second is of old files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. Raises ConfigError when it is missing or not one."""
    if not path.is_file():
        raise ConfigError("model", f"{path} is missing; expected a Hugging Face model folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON or bad UTF-8
        raise ConfigError("model", f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError("model", f"{path} is not a JSON object")
    return raw


def publish_folder(folder: Path, target: Path, last: Path) -> None:
    """Rename, so that nobody sees half a folder; another process's is as good. Folders that were made for an earlier
    state of the same source go: their names begin like ``target``'s, up to its dash.

    last: a file that a whole ``target`` has. Raises OSError.
    """
    for stale in target.parent.glob(f"{target.name.partition('-')[0]}-*"):
        if stale != target:
            shutil.rmtree(stale, ignore_errors=True)
    try:
        os.rename(folder, target)
    except OSError:
        if not last.is_file():
            raise


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a sequence: those of ``generation_config.json`` where it has any, else those of ``config.json``.

    Raises ConfigError for what is no id.
    """
    for name in ("generation_config.json", "config.json"):
        raw = read_json(folder / name) if (folder / name).is_file() else {}
        own, inner = raw.get("eos_token_id"), _text_section(raw).get("eos_token_id")
        value = inner if own is None else own
        if value is None:
            continue
        try:
            return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("model", f"{folder / name}: eos_token_id cannot be read: {error}") from None
    return ()


def _text_section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's section, where ``config.json`` has one."""
    section = raw.get("text_config")
    return section if isinstance(section, Mapping) else {}


def with_tokenizers_end(ids: Sequence[int], own: int | None) -> tuple[int, ...]:
    """Ids that end an answer: those of the model's configs, and the tokenizer's ``eos_token``. Fine-tunes that end a
    turn with a token of their own name it there alone, beside the base model's configs."""
    return (*ids, *(() if own is None or own in ids else (own,)))


def special_token(value: Any) -> str | None:
    """The text of a special token of ``tokenizer_config.json``, which is text or an object with it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def quantization_config(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section of ``config.json`` about quantised layers; None where there is none. Raises ConfigError."""
    section = next((raw[name] for name in QUANTISED if raw.get(name)), None)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError("model", "quantization_config of config.json is not an object")
    return section
