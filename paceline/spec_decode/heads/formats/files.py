"""Tensors of a draft head's folder, renamed to canonical names and converted as they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # noqa: TID251 - what torch raises
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.model_files import read_json
from paceline.models.loader import HARMLESS, moved, weights_digest
from paceline.models.registry import KEPT_FLOAT32, open_checkpoint
from paceline.spec_decode.heads.formats.layer import Shapes, refused

PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
HASH_CHUNK = 1 << 20

Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def blaming_drafter_path() -> Iterator[None]:
    """Errors of the model loader name the option that a head came from."""
    try:
        yield
    except ConfigError as error:
        raise refused(error.message) from error


@dataclass(frozen=True)
class HeadFiles:
    """A folder as it lies on disk."""

    folder: Path
    config: dict[str, object]
    tensors: Mapping[str, Any]  # by the names in the files; tensors in float32 or as they are, or a QuantizedWeight

    @property
    def names(self) -> list[str]:
        """Sorted."""
        return sorted(self.tensors)


def open_head(folder: Path) -> HeadFiles:
    """Config and tensors of a folder; safetensors are read on access. Raises ConfigError."""
    with blaming_drafter_path():
        if not folder.is_dir():
            raise refused(f"{folder} is not a folder; expected one with config.json and the weights of a draft head")
        config = read_json(folder / "config.json")
        file = _pickle(folder)
        # float32 holds bf16 and fp16 exactly, so that changes such as 1 + w round once.
        every = open_checkpoint(folder, torch.float32) if file is None else _unpickle(file)
        return HeadFiles(folder, config, every)


def _pickle(folder: Path) -> Path | None:
    """The torch file of a folder that has no safetensors."""
    if any(folder.glob("*.safetensors")):
        return None
    return next((folder / name for name in PICKLES if (folder / name).is_file()), None)


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251 - tensors alone
    except (UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise refused(f"{file} is not a readable file of weights: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise refused(f"{file} does not hold tensors by name")
    return {str(name): tensor for name, tensor in loaded.items()}


def head_digest(folder: Path) -> str:
    """Identity of a head's weights, 32 hex digits; see ``weights_digest``. Torch files are hashed whole."""
    file = _pickle(folder)
    if file is None:
        return weights_digest(folder)
    digest = hashlib.blake2b(file.name.encode(), digest_size=16)
    with file.open("rb") as opened:
        while chunk := opened.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """Where a canonical tensor comes from."""

    source: str
    change: Change | None = None


class Renamed(Mapping[str, Any]):
    """Canonical tensors, read, changed and converted when asked for."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        entries: Mapping[str, Entry],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors, self._entries = tensors, entries
        self._dtype, self._device = dtype, device

    def __getitem__(self, name: str) -> Any:
        entry = self._entries[name]
        tensor = self._tensors[entry.source]
        if isinstance(tensor, QuantizedWeight):
            if entry.change is None:
                return moved(tensor, self._device)
            tensor = tensor.dequantised()
        floating = tensor.is_floating_point()
        if entry.change is not None:
            tensor = entry.change(tensor.float() if floating else tensor)
        if not floating:
            return tensor.to(self._device)
        return tensor.to(device=self._device, dtype=torch.float32 if name.endswith(KEPT_FLOAT32) else self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def check_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    """Raise ConfigError naming every tensor that is missing and every one that is unknown."""
    have, want = {name for name in found if not name.endswith(HARMLESS)}, set(expected)
    if unknown := sorted(have - want):
        raise refused(f"{what}: {len(unknown)} unknown tensors: {', '.join(unknown[:20])}")
    if missing := sorted(want - have):
        raise refused(f"{what}: {len(missing)} tensors are missing: {', '.join(missing[:20])}")


def check_shapes(tensors: Mapping[str, Any], shapes: Shapes, what: str) -> None:
    """Raise ConfigError for the first tensor shaped otherwise than the config says."""
    for name, shape in shapes.items():
        if (found := tuple(tensors[name].shape)) != shape:
            raise refused(f"{what}: {name} has shape {found}, config.json makes it {shape}")
