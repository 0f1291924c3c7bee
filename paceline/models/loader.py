"""Weights from safetensors, each tensor consumed exactly once (algorithms.md E12)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from paceline.errors import ConfigError

HARMLESS = ("rotary_emb.inv_freq",)
TIED = "lm_head.weight"
EDGE_BYTES = 64 * 1024


class WeightBag:
    """Tensors by name. ``take`` removes; ``finish`` complains about what nobody took."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor called ``name``, of ``shape``. Raises ConfigError when it is missing or shaped otherwise."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ConfigError("model", f"tensor {name} is missing from the checkpoint, or was asked for twice")
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError("model", f"tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        return tensor

    def finish(self) -> None:
        """Raise ConfigError naming tensors left over; a tied head's copy and rotary buffers are harmless."""
        left = sorted(n for n in self._tensors if n != TIED and not n.endswith(HARMLESS))
        if left:
            shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            raise ConfigError("model", f"tensors that this architecture does not know: {shown}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: those that the index names, or all."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        raise ConfigError("model", f"{folder} lacks {', '.join(missing) or 'safetensors files'}")
    return files


def load_weights(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a folder, converted to ``dtype``."""
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                if name in tensors:
                    raise ConfigError("model", f"tensor {name} is in two files of {folder}")
                tensors[name] = opened.get_tensor(name).to(dtype)
    return tensors


def weights_digest(folder: Path) -> str:
    """Identity of a folder's weights: file names, sizes, headers and edges; cheap, stable across copies."""
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
            digest.update(opened.read(min(header, 16 * 1024 * 1024)))
            digest.update(opened.read(EDGE_BYTES))
            opened.seek(max(size - EDGE_BYTES, 0))
            digest.update(opened.read(EDGE_BYTES))
    return digest.hexdigest()
