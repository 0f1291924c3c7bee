"""What the engine needs of a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch

from paceline.kvcache.layout import KvLayer, KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.models.context import AfterLayer as AfterLayer
from paceline.models.context import ForwardContext as ForwardContext
from paceline.models.loader import WeightBag


class AuxCapture:
    """Collects the residual stream entering some layers, for drafters that read it (EAGLE-3, algorithms.md C6).

    Layer numbers are 0-based; ``num_layers`` itself means the stream after the last layer, before the final norm.
    """

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._rows: dict[int, torch.Tensor] = {}

    def see(self, layer: int, added: torch.Tensor, residual: torch.Tensor) -> None:
        """A model calls it before each layer: ``residual + added`` is the stream. Both [T, hidden_size]."""
        if layer in self.layers:
            self._rows[layer] = residual + added

    def rows(self) -> torch.Tensor:
        """[T, len(layers) * hidden_size], in the order of ``layers``."""
        return torch.cat([self._rows[layer] for layer in self.layers], dim=-1)


class DecoderBlock(Protocol):
    """One decoder layer of a model's own kind; also the block of its MTP modules."""

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """x: what the block before added; residual: [T, hidden], updated in place -> what this block adds last."""
        ...


class TargetModel(ABC):
    """A causal language model over the paged pool."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kv_layers: tuple[KvLayer, ...]
    quantize: str = "none"  # what its linear layers were rounded to when they were loaded; draft heads follow it

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T] -> [T, hidden_size]."""

    @abstractmethod
    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """Run the batch, writing its KV; returns hidden rows after the final norm, [T, hidden_size].

        ``aux`` is shown the residual stream at every layer.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden_size] after the final norm -> float32 [R, vocab_size]."""

    @abstractmethod
    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> DecoderBlock:
        """A layer of this model's kind from ``{prefix}.*``, on KV layer ``kv_layer`` of the pool."""

    @abstractmethod
    def rope_table(self) -> torch.Tensor:
        """float32 [max_positions, head_dim], see layers.rotary; drafters of the same geometry share it."""

    def make_pool(self, layout: KvLayout, num_pages: int, page_size: int) -> KvPool:
        """The pool that it runs over. layout: its own layers, then the drafter's."""
        return KvPool(layout, num_pages, page_size, self.device)

    def alive(self) -> bool:
        """Whether it can run: not once one of the ranks that share it is lost."""
        return True

    def close(self) -> None:  # noqa: B027  (most models have one rank)
        """End the ranks that share it. It is of no use then. Idempotent."""
