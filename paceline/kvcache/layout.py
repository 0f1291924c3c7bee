"""What one token occupies in the KV pool: a list of layers, target layers first, then the drafter's."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from paceline.errors import ConfigError

SCALE_BYTES = torch.float32.itemsize  # behind the codes of an int8 row


class LayerKind(enum.StrEnum):
    """How a layer stores a token."""

    GQA = "gqa"  # K and V, [num_kv_heads, head_dim] each
    MLA = "mla"  # one latent row, [head_dim] (compressed KV and rope part), no separate V


class LayerOwner(enum.StrEnum):
    """The owner of a layer; hand-off bytes are counted by it."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class KvLayer:
    """One layer's share of a token."""

    kind: LayerKind
    owner: LayerOwner
    num_kv_heads: int
    head_dim: int

    @property
    def row_elems(self) -> int:
        """Elements of one token in this layer (K and V together for GQA)."""
        return self.head_dim if self.kind is LayerKind.MLA else 2 * self.num_kv_heads * self.head_dim

    def text(self) -> str:
        """The layer's canonical text, for example ``target:gqa:3x64``."""
        heads = 1 if self.kind is LayerKind.MLA else self.num_kv_heads
        return f"{self.owner}:{self.kind}:{heads}x{self.head_dim}"


@dataclass(frozen=True)
class KvLayout:
    """All layers of a pool, in canonical order, and their dtype. Page size is not part of it: it may differ
    between two nodes, since the wire order is (layer, token, head)."""

    layers: tuple[KvLayer, ...]
    dtype: torch.dtype
    hidden: torch.dtype | None = None  # of the hidden rows that cross beside KV rows; None: ``dtype``

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype of hidden rows, which are as the model computes them however KV is kept."""
        return self.hidden or self.dtype

    def with_layers(self, layers: Iterable[KvLayer]) -> KvLayout:
        """Other layers of the same dtypes."""
        return replace(self, layers=tuple(layers))

    @classmethod
    def of(cls, layers: Iterable[KvLayer], dtype: torch.dtype, kv_dtype: str = "auto") -> KvLayout:
        """What a model of ``dtype`` with ``layers`` keeps. kv_dtype: the option.

        In int8 a layer's ``head_dim`` is what a head's row occupies: the codes and, behind them, the scale. Whoever
        moves rows need not know. Raises ConfigError for latents in int8.
        """
        layers = tuple(layers)
        if kv_dtype == "auto":
            return cls(layers, dtype)
        if any(layer.kind is LayerKind.MLA for layer in layers):
            raise latents_refused()
        return cls(tuple(replace(layer, head_dim=layer.head_dim + SCALE_BYTES) for layer in layers), torch.int8, dtype)

    @property
    def is_int8(self) -> bool:
        """Whether rows are codes with scales (layers/kv8.py)."""
        return self.dtype is torch.int8

    def layer_range(self, owner: LayerOwner) -> range:
        """Indices of the layers that belong to ``owner`` (contiguous)."""
        indices = [i for i, layer in enumerate(self.layers) if layer.owner is owner]
        return range(indices[0], indices[-1] + 1) if indices else range(0)

    def token_bytes(self, owner: LayerOwner) -> int:
        """Bytes of one token over the layers of ``owner`` (algorithms.md H4)."""
        return sum(layer.row_elems for layer in self.layers if layer.owner is owner) * self.dtype.itemsize

    def text(self) -> str:
        """Equal if and only if the bytes of a row mean the same: ``bfloat16 target:gqa:3x64*30 draft:gqa:3x64*1``."""
        runs = (f"{layer.text()}*{len(list(run))}" for layer, run in groupby(self.layers))
        return " ".join([str(self.dtype).removeprefix("torch."), *runs])


def latents_refused() -> ConfigError:
    """What is said to ``kv_dtype`` int8 for a model with latent attention."""
    return ConfigError("kv_dtype", "int8 is for keys and values of heads, and this model keeps latents (MLA)")
