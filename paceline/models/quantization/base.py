"""What every scheme of quantised checkpoints answers: which tensors are its own, and the weight that they make.

A scheme is one file here and one record in ``schemes.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.layers.packed import GROUP_MULTIPLE
from paceline.layers.quantized import LinearWeight

FP8 = "F8_E4M3"  # safetensors' names of types
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LayerTensor:
    """One tensor of a quantised layer, not read yet."""

    dtype: str  # safetensors' name of it
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]  # as it lies in its file


LayerTensors = Mapping[str, LayerTensor]  # by the last part of a tensor's name: ``weight``, ``weight_scale``


class Scheme(ABC):
    """The layers of one checkpoint that are quantised in one scheme.

    marks: last parts of the names of tensors that only quantised layers have. ignored: of tensors that are not read,
    such as scales of activations, which are taken from the activations here.
    """

    marks: frozenset[str]
    ignored: frozenset[str] = frozenset()

    @abstractmethod
    def check(self, layer: str, parts: LayerTensors) -> None:
        """Raise ConfigError for a layer that ``read`` cannot read: by types and shapes, and by small tensors."""

    @abstractmethod
    def read(self, layer: str, parts: LayerTensors) -> LinearWeight:
        """The weight of a layer that was checked; float32 where no kernel can multiply by its codes."""

    def says_of(self, layer: str) -> Hashable:
        """What besides types and shapes decides how a layer is read. Raises ConfigError."""
        return None


class DryScheme(Scheme):
    """A scheme over tensors without memory: layers of one layout have one weight, which is made once."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme, self.marks, self.ignored = scheme, scheme.marks, scheme.ignored
        self._made: dict[Hashable, LinearWeight] = {}

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        self._scheme.check(layer, parts)

    def read(self, layer: str, parts: LayerTensors) -> LinearWeight:
        """See Scheme."""
        layout = frozenset((name, part.dtype, part.shape) for name, part in parts.items())
        key = (self._scheme.says_of(layer), layout)
        if key not in self._made:
            self._made[key] = self._scheme.read(layer, parts)
        return self._made[key]


Reader = Callable[[Mapping[str, Any]], Scheme]  # from quantization_config; raises ConfigError


def refused(message: str) -> ConfigError:
    """An error about a quantised checkpoint."""
    return ConfigError("model", f"quantised checkpoint: {message}")


def whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number of a config. Raises ConfigError where it is none."""
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(f"{name} {value!r} is not a whole number")
    return value


def need(
    layer: str, parts: LayerTensors, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None
) -> LayerTensor:
    """A tensor of a layer. Raises ConfigError where it is missing, or of another type or shape."""
    if name not in parts:
        raise refused(f"{layer}.{name} is missing")
    part = parts[name]
    if part.dtype not in dtypes:
        raise refused(f"{layer}.{name} is {part.dtype}, expected {' or '.join(dtypes)}")
    if shape is not None and part.shape != shape:
        raise refused(f"{layer}.{name} has shape {part.shape}, expected {shape}")
    return part


def check_groups(layer: str, group_size: int, columns: int) -> None:
    """Raise ConfigError for groups of ``columns`` input features that no kernel can hold."""
    if group_size < columns and group_size % GROUP_MULTIPLE:
        raise refused(f"{layer} has groups of {group_size}: multiples of {GROUP_MULTIPLE} are supported")


def matrix(layer: str, parts: LayerTensors, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """Shape of a tensor that must be a matrix. Raises ConfigError."""
    shape = need(layer, parts, name, dtypes).shape
    if len(shape) != 2 or min(shape) < 1:
        raise refused(f"{layer}.{name} has shape {shape}, expected a matrix")
    return shape[0], shape[1]
