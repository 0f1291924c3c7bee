"""Weights from safetensors, each tensor consumed exactly once (algorithms.md E12)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import ConfigError
from paceline.layers.quantized import LinearWeight
from paceline.layers.shared_weights import SMALLEST, kept
from paceline.model_files import read_json

HARMLESS = ("rotary_emb.inv_freq",)  # derived from the config, written by old versions of transformers
TIED = "lm_head.weight"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EDGE_BYTES = 64 * 1024
SAMPLE_BYTES = 512
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class WeightBag:
    """Tensors by name, each read when it is taken. ``finish`` complains about what nobody took."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._left = set(tensors)
        self._device: torch.device | None = None

    def onto(self, device: torch.device) -> WeightBag:
        """Tensors are taken from now on onto ``device``, whatever they were read on. Returns itself."""
        self._device = device
        return self

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor called ``name``, of ``shape``. Raises ConfigError when it is missing or shaped otherwise."""
        if name not in self._left:
            raise ConfigError("model", f"tensor {name} is missing from the checkpoint, or was asked for twice")
        self._left.remove(name)
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError("model", f"tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if self._device is not None:
            tensor = tensor.to(self._device)
        # A view would keep the whole file in memory for as long as a norm lives.
        return tensor.clone() if tensor.nbytes < SMALLEST else tensor

    def take_linear(self, name: str, shape: tuple[int, int] | None = None) -> LinearWeight:
        """The weight of a linear layer, [out_features, in_features], as the checkpoint has it. See ``take``."""
        return self.take(name, shape)

    def take_table(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """``take`` of a tensor that is used as it is, such as an embedding: on the CPU a copy, shared where weights
        are (layers.shared_weights)."""
        table = self.take(name, shape)
        return kept(shape, table.dtype, lambda copy: copy.copy_(table)) if table.device.type == "cpu" else table

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is still there. Raises ConfigError when it is missing."""
        if name not in self._left:
            raise ConfigError("model", f"tensor {name} is missing from the checkpoint, or was taken before")
        return tuple(self._tensors[name].shape)

    def holds(self, name: str) -> bool:
        """Whether a tensor is still there."""
        return name in self._left

    def finish(self) -> None:
        """Raise ConfigError naming every tensor left over; a tied head's copy and rotary buffers are harmless."""
        left = sorted(n for n in self._left if n != TIED and not n.endswith(HARMLESS))
        self._tensors, self._left = {}, set()  # the files may be closed now
        if left:
            raise ConfigError("model", f"{len(left)} tensors that this architecture does not know: {', '.join(left)}")


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of several safetensors files, read on access; floating ones are converted to ``dtype``."""

    def __init__(self, files: list[Path], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._where: dict[str, Any] = {}  # tensor name -> the open file that holds it
        for file in files:
            opened = _open(file)
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                if name in self._where:
                    raise ConfigError("model", f"tensor {name} is in two files of {file.parent}")
                self._where[name] = opened

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def load_weights(folder: Path, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """All tensors of a folder, lazily. Raises ConfigError when a file is missing or damaged."""
    return LazyTensors(weight_files(folder), dtype)


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


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError("model", f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ConfigError("model", f"{index} names files outside its folder: {', '.join(outside)}")
    return names


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("model", f"{file} is not a readable safetensors file: {error}") from error


def weights_digest(folder: Path) -> str:
    """Identity of a folder's weights: cheap, stable across copies, 32 hex digits.

    Hashes names, sizes, headers, the first and last 64 KiB of each file, and 512 bytes in the middle of every tensor:
    a fine-tune that kept the embeddings and norms differs from its base only there.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER_BYTES))
            digest.update(header)
            digest.update(opened.read(EDGE_BYTES))
            opened.seek(max(size - EDGE_BYTES, 0))
            digest.update(opened.read(EDGE_BYTES))
            for middle in _middles(file, header):
                opened.seek(middle)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _middles(file: Path, header: bytes) -> list[int]:
    """Byte offset in the file of the middle of every tensor."""
    try:
        entries = json.loads(header)
        ranges = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        return [8 + len(header) + (low + high) // 2 for low, high in ranges]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("model", f"{file} has a damaged safetensors header") from error
