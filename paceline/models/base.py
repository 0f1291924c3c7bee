"""What the engine needs of a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch
from paceline.kvcache.layout import KvLayer, KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.models.loader import WeightBag

AfterLayer = Callable[[int], None]


@dataclass(frozen=True)
class ForwardContext:
    """Everything one forward passes down; nothing is global."""

    batch: ForwardBatch
    kv: KvPool
    attention: AttentionBackend
    planned: AttentionPlan | None = None  # where it was made before, as for a graph
    after_layer: AfterLayer | None = None

    @classmethod
    def build(
        cls, batch: ForwardBatch, kv: KvPool, attention: AttentionBackend, after_layer: AfterLayer | None = None
    ) -> ForwardContext:
        """Over ``batch``, which is planned once for all layers, when the first of them asks."""
        return cls(batch, kv, attention, None, after_layer)

    @cached_property
    def plan(self) -> AttentionPlan:
        """What ``attention`` has derived from ``batch``."""
        return self.attention.plan(self.batch) if self.planned is None else self.planned

    def layer_done(self, layer: int) -> None:
        """A model calls it after each of its layers (0-based): the layer's KV rows of the batch are in the pool, or on
        a GPU will be once what the current stream holds is done."""
        if self.after_layer is not None:
            self.after_layer(layer)


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
