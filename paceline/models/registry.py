"""Loads a target model from its Hugging Face folder, whatever the family, and the MTP modules that lie beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.errors import ConfigError
from paceline.layers.quantized import LinearWeight
from paceline.model_files import quantization_config, read_json
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.families import FAMILIES
from paceline.models.loader import NOT_ROUNDED, LazyTensors, WeightBag, rounded_already
from paceline.models.quantization.base import Scheme
from paceline.models.quantization.schemes import read_scheme
from paceline.models.quantization.tensors import QuantizedTensors
from paceline.models.weight_files import gguf_file, weight_files
from paceline.models.wrapped import text_config

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by the words of option dtype
KEPT_FLOAT32 = "e_score_correction_bias"  # bf16 would round away what it corrects, and choose other experts
FP8_SCALE = "weight_scale_inv"
MTP_NORMS = ("enorm", "token_layernorm")  # of the embedding, one in every module


class CheckpointTensors(LazyTensors):
    """A checkpoint's tensors in ``dtype``, but for those that a lower precision would spoil."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name.endswith(KEPT_FLOAT32):
            return self.stored(name).float()
        return super().__getitem__(name)


class ChosenTensors(Mapping[str, LinearWeight]):
    """Some tensors of a checkpoint, still read on access."""

    def __init__(self, whole: Mapping[str, LinearWeight], names: frozenset[str]) -> None:
        self._whole, self._names = whole, names

    def __getitem__(self, name: str) -> LinearWeight:
        if name not in self._names:
            raise KeyError(name)
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def open_checkpoint(folder: Path, dtype: torch.dtype) -> Mapping[str, LinearWeight]:
    """All weights of a folder, in the layers that ``config.json`` says are quantised as they lie there.

    dtype: of the others. Raises ConfigError for files that are missing or damaged, and for quantised weights that
    config.json does not announce or that cannot be read here; no weight is read for that.
    """
    if (gguf := gguf_file(folder)) is not None:
        from paceline.models.gguf.file import GgufFile
        from paceline.models.gguf.tensors import GgufTensors

        return GgufTensors(GgufFile(gguf), dtype)
    scheme = scheme_of(read_json(folder / "config.json"))
    tensors = CheckpointTensors.of(folder, dtype)
    if scheme is not None:
        return QuantizedTensors(tensors, scheme, dtype)
    if scale := next((name for name in tensors if name.endswith(FP8_SCALE)), None):
        raise ConfigError("model", f"{scale} is of a quantised checkpoint, but config.json has no quantization_config")
    return tensors


def scheme_of(raw: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a checkpoint by its config.json; None for floats, and where the family's class reads its scheme
    itself. Raises ConfigError."""
    raw = text_config(raw)
    config = quantization_config(raw) or {}
    families = [FAMILIES[name] for name in raw.get("architectures") or () if name in FAMILIES]
    own = any(config.get("quant_method") in family.quant_methods for family in families)
    return None if own else read_scheme(raw)


class Builder(Protocol):
    """The class of a family's models."""

    float32_norms: bool

    def __call__(self, spec: ModelSpec, weights: WeightBag, dtype: torch.dtype, device: torch.device) -> TargetModel:
        """A model on ``device`` that has taken its weights."""


def model_class(family: str) -> Builder:
    """The class that runs the models of a family."""
    module, _, name = next(record.model for record in FAMILIES.values() if record.name == family).partition(":")
    found: Builder = getattr(import_module(module), name)
    return found


@contextmanager
def taking_weights(folder: Path) -> Iterator[None]:
    """Inside, a model takes the weights of ``folder``. Where they lie in a GGUF file, torch has one thread: each of the
    thousands of experts is a dozen small tensors, at each of which torch's threads would wait for one another."""
    threads = torch.get_num_threads()
    try:
        if gguf_file(folder) is not None:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def load_target(folder: Path, dtype: torch.dtype, device: torch.device, quantize: str = "none") -> TargetModel:
    """The target model of a Hugging Face folder; MTP modules in its checkpoint are left for the drafter.

    quantize: what its linear layers are rounded to, see WeightBag.rounded.
    Raises ConfigError naming whatever is missing, left over or unsupported.
    """
    spec = ModelSpec.from_folder(folder)
    tensors = open_checkpoint(folder, dtype)
    if quantize != NOT_ROUNDED and isinstance(tensors, QuantizedTensors):  # before gigabytes of an embedding are read
        raise rounded_already()
    bag = WeightBag(
        ChosenTensors(tensors, frozenset(name for name in tensors if not name.startswith(spec.mtp_prefixes)))
    )
    bag.rounded(quantize)
    with taking_weights(folder):
        model = model_class(spec.family)(spec, bag, dtype, device)
    bag.finish()
    return model


def holds_mtp(folder: Path, spec: ModelSpec) -> bool:
    """Whether a target's own checkpoint has MTP modules (algorithms.md F5 to F7)."""
    if gguf_file(folder) is not None:
        return False
    tensors = LazyTensors(weight_files(folder), torch.bfloat16)
    return any(f"{prefix}{norm}.weight" in tensors for prefix in spec.mtp_prefixes[:1] for norm in MTP_NORMS)
