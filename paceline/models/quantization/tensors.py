"""A quantised checkpoint as a mapping of weights: quantised layers appear under the name of their weight."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

import torch

from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.quantization.base import FLOATS, LayerTensor, LayerTensors, Scheme, refused

log = logging.getLogger(__name__)

WEIGHT = "weight"


class Stored(Protocol):
    """A checkpoint's tensors as they lie in its files; models.loader.LazyTensors."""

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it lies there."""
        ...

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, by safetensors' name for it, and shape."""
        ...

    def __getitem__(self, name: str, /) -> torch.Tensor: ...
    def __iter__(self) -> Iterator[str]: ...


class AsFloats(Mapping[str, torch.Tensor]):
    """The weights of a checkpoint as floats of ``dtype``, quantised ones too."""

    def __init__(self, weights: Mapping[str, LinearWeight], dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._weights[name]
        return found.dequantised().to(self._dtype) if isinstance(found, QuantizedWeight) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class QuantizedTensors(Mapping[str, LinearWeight]):
    """Weights by name, each read when it is asked for. What the scheme does not quantise stays as it is."""

    def __init__(self, stored: Stored, scheme: Scheme, dtype: torch.dtype) -> None:
        """dtype: of layers that the scheme can only read as floats. Raises ConfigError for a layer that the scheme
        cannot read; no weight is read for that."""
        self._stored, self._scheme, self._dtype = stored, scheme, dtype
        self._told = False
        self._layers: dict[str, LayerTensors] = {}  # by the name of the layer's weight
        self._plain = self._sort()
        for name, parts in self._layers.items():
            scheme.check(name.removesuffix(f".{WEIGHT}"), parts)
        for name in self._plain:
            kind, _ = stored.layout(name)
            if name.endswith(f".{WEIGHT}") and kind not in FLOATS:
                raise refused(f"{name} is {kind}, but no scales lie beside it")

    def _sort(self) -> list[str]:
        """Put the tensors of quantised layers together; returns the names of the others."""
        found: dict[str, dict[str, LayerTensor]] = {}
        for name in self._stored:
            layer, _, last = name.rpartition(".")
            if last in self._scheme.marks:
                found.setdefault(layer, {})[last] = self._part(name)
        plain = []
        for name in self._stored:
            layer, _, last = name.rpartition(".")
            if last == WEIGHT and layer in found:
                found[layer][last] = self._part(name)
            elif last not in self._scheme.marks | self._scheme.ignored:
                plain.append(name)
        self._layers.update({f"{layer}.{WEIGHT}": parts for layer, parts in found.items()})
        return plain

    def _part(self, name: str) -> LayerTensor:
        kind, shape = self._stored.layout(name)
        return LayerTensor(kind, shape, partial(self._stored.stored, name))

    def __getitem__(self, name: str) -> LinearWeight:
        if (parts := self._layers.get(name)) is not None:
            read = self._scheme.read(name.removesuffix(f".{WEIGHT}"), parts)
            if not isinstance(read, torch.Tensor):
                return read
            if not self._told:
                self._told = True
                log.warning("%s has groups out of order (desc_act, actorder): such layers are kept as floats", name)
            return read.to(self._dtype)
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._layers

    def __len__(self) -> int:
        return len(self._plain) + len(self._layers)
