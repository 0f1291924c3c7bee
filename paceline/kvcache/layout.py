"""What one token occupies in the KV pool: a list of layers, target layers first, then the drafter's."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import groupby

import torch


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
