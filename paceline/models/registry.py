"""Loads a target model from its Hugging Face folder, whatever the family, and the MTP modules that lie beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

import torch

from paceline.errors import ConfigError
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.families import FAMILIES
from paceline.models.loader import LazyTensors, WeightBag, weight_files

Builder = Callable[[ModelSpec, WeightBag, torch.dtype, torch.device], TargetModel]
KEPT_FLOAT32 = "e_score_correction_bias"  # bf16 would round away what it corrects, and choose other experts
FP8_SCALE = "weight_scale_inv"
MTP_NORMS = ("enorm", "token_layernorm")  # of the embedding, one in every module


class CheckpointTensors(LazyTensors):
    """A checkpoint's tensors in ``dtype``, but for those that a lower precision would spoil."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name.endswith(KEPT_FLOAT32):
            kept: torch.Tensor = self._where[name].get_tensor(name)
            return kept.float()
        return super().__getitem__(name)


class Part(Mapping[str, torch.Tensor]):
    """Some tensors of a checkpoint, still read on access."""

    def __init__(self, whole: Mapping[str, torch.Tensor], names: frozenset[str]) -> None:
        self._whole, self._names = whole, names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_checkpoint(folder: Path, dtype: torch.dtype) -> CheckpointTensors:
    """All tensors of a folder. Raises ConfigError for files that are missing or damaged, and for FP8 weights."""
    tensors = CheckpointTensors(weight_files(folder), dtype)
    if scale := next((name for name in tensors if name.endswith(FP8_SCALE)), None):
        raise ConfigError("model", f"quantized checkpoints are not supported (FP8: {scale}); convert it to bf16 first")
    return tensors


def model_class(family: str) -> Builder:
    """The class that runs the models of a family."""
    module, _, name = next(record.model for record in FAMILIES.values() if record.name == family).partition(":")
    found: Builder = getattr(import_module(module), name)
    return found


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetModel:
    """The target model of a Hugging Face folder; MTP modules in its checkpoint are left for the drafter.

    Raises ConfigError naming whatever is missing, left over or unsupported.
    """
    spec = ModelSpec.from_folder(folder)
    tensors = open_checkpoint(folder, dtype)
    modules = spec.mtp_prefixes
    bag = WeightBag(Part(tensors, frozenset(name for name in tensors if not name.startswith(modules))))
    model = model_class(spec.family)(spec, bag, dtype, device)
    bag.finish()
    return model


def holds_mtp(folder: Path, spec: ModelSpec) -> bool:
    """Whether a target's own checkpoint has MTP modules (algorithms.md F5 to F7)."""
    tensors = CheckpointTensors(weight_files(folder), torch.bfloat16)
    return any(f"{prefix}{norm}.weight" in tensors for prefix in spec.mtp_prefixes[:1] for norm in MTP_NORMS)
