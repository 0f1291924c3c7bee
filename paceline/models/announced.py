"""The tensors of a checkpoint as its headers announce them: names, shapes and types, and no weight is read.

They come from a folder's safetensors headers, or from a small JSON file that lists them by rule: ``config`` is the
model's config.json, ``tensors`` a list of [name, shape, type], where ``{0-60}`` in a name stands for each number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.model_files import read_json
from paceline.models.registry import KEPT_FLOAT32
from paceline.models.weight_files import MAX_HEADER_BYTES, weight_files
from paceline.models.wrapped import naming

RANGE = re.compile(r"\{(\d{1,6})-(\d{1,6})\}")
MAX_TENSORS = 1_000_000  # of a checkpoint; the largest public ones have a tenth
MAX_ELEMENTS = 1 << 48  # of a tensor
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
WHOLE = {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}
STORED = FLOATS | WHOLE | {"F8_E4M3": torch.float8_e4m3fn}  # by safetensors' names


@dataclass(frozen=True)
class Announced:
    """One tensor. dtype: safetensors' name for it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return prod(self.shape)


def read_announced(path: Path) -> tuple[dict[str, Any], dict[str, Announced]]:
    """config.json and tensors of a folder, or of a JSON file that lists them. Raises ConfigError."""
    if path.is_dir():
        found: dict[str, Announced] = {}
        for file in weight_files(path):
            found |= _header(file)
        return _own_names(read_json(path / "config.json"), _bounded(found, path), path)
    if not path.is_file():
        hint = "`paceline pull` prints the folder of a known model"
        raise ConfigError("model", f"{path} is no model folder, no GGUF file and no JSON file with tensors; {hint}")
    raw = read_json(path)
    config, listed = raw.get("config"), raw.get("tensors")
    if not isinstance(config, dict) or not isinstance(listed, list):
        raise ConfigError("model", f"{path} needs config, an object, and tensors, a list")
    return _own_names(config, _expanded(listed, path), path)


def _own_names(
    raw: dict[str, Any], announced: Mapping[str, Announced], path: Path
) -> tuple[dict[str, Any], dict[str, Announced]]:
    """``raw``, and the language model's tensors by its own names (models.wrapped)."""
    names, found = naming(raw), dict[str, Announced]()
    for name, tensor in announced.items():
        if (own := names(name)) is None:
            continue
        if own in found:
            raise ConfigError("model", f"tensor {own} is twice in {path}")
        found[own] = tensor
    return raw, found


def _header(file: Path) -> dict[str, Announced]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= min(MAX_HEADER_BYTES, file.stat().st_size):
            raise ConfigError("model", f"{file} has a damaged safetensors header")
        header = opened.read(size)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        return {name: _entry(entry["shape"], entry["dtype"]) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("model", f"{file} has a damaged safetensors header") from error


def _entry(shape: list[int], dtype: str) -> Announced:
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape)
    if not whole or prod(size or 1 for size in shape) > MAX_ELEMENTS:
        raise ValueError(f"bad shape {shape}")
    return Announced(tuple(shape), str(dtype))


def _expanded(listed: list[Any], path: Path) -> dict[str, Announced]:
    found: dict[str, Announced] = {}
    for entry in listed:
        try:
            name, shape, dtype = entry
            announced, spans = _entry(shape, dtype), [(int(low), int(high)) for low, high in RANGE.findall(name)]
        except (ValueError, TypeError) as error:
            raise ConfigError("model", f"{path}: {entry!r} is not [name, shape, type]: {error}") from None
        if len(found) + prod(high - low + 1 for low, high in spans) > MAX_TENSORS:
            raise ConfigError("model", f"{path} lists more than {MAX_TENSORS} tensors")
        parts = RANGE.split(name)[::3]  # what lies between the spans
        for numbers in product(*(range(low, high + 1) for low, high in spans)):
            found["".join(chain(*zip(parts, map(str, numbers), strict=False), parts[-1:]))] = announced
    return found


def _bounded(found: dict[str, Announced], path: Path) -> dict[str, Announced]:
    if len(found) > MAX_TENSORS:
        raise ConfigError("model", f"{path} has more than {MAX_TENSORS} tensors")
    return found


class MetaTensors(Mapping[str, torch.Tensor]):
    """Tensors without memory. As a loader gives them, floats and float8 are in ``dtype``; ``stored`` has them as they
    lie in their files, where quantised layers are read from."""

    def __init__(self, announced: Mapping[str, Announced], dtype: torch.dtype) -> None:
        """Raises ConfigError for a type that nothing here reads."""
        self._announced, self._dtype = announced, dtype
        strange = next((name for name, tensor in announced.items() if tensor.dtype not in STORED), None)
        if strange is not None:
            raise ConfigError(
                "model", f"tensor {strange} is of type {announced[strange].dtype}, which is not supported"
            )

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._announced[name]
        dtype = WHOLE.get(found.dtype, torch.float32 if name.endswith(KEPT_FLOAT32) else self._dtype)
        return torch.empty(found.shape, dtype=dtype, device="meta")

    def stored(self, name: str) -> torch.Tensor:
        """The tensor in the type that it lies in."""
        found = self._announced[name]
        return torch.empty(found.shape, dtype=STORED[found.dtype], device="meta")

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, by safetensors' name for it, and shape."""
        found = self._announced[name]
        return found.dtype, found.shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._announced)

    def __len__(self) -> int:
        return len(self._announced)
