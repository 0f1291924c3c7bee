"""What one forward passes down to the layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch
from paceline.kvcache.pool import KvPool

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
