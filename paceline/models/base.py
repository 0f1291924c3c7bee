"""What the engine needs of a target model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch
from paceline.kvcache.layout import KvLayer
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec


@dataclass(frozen=True)
class ForwardContext:
    """Everything one forward passes down; nothing is global."""

    batch: ForwardBatch
    kv: KvPool
    attention: AttentionBackend
    plan: AttentionPlan

    @classmethod
    def build(cls, batch: ForwardBatch, kv: KvPool, attention: AttentionBackend) -> ForwardContext:
        """Plan ``batch`` once for all layers."""
        return cls(batch, kv, attention, attention.plan(batch))


class TargetModel(ABC):
    """A causal language model over the paged pool."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kv_layers: tuple[KvLayer, ...]

    @abstractmethod
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: int64 [T] -> [T, hidden_size]."""

    @abstractmethod
    def forward(self, context: ForwardContext) -> torch.Tensor:
        """Run the batch, writing its KV; returns hidden rows after the final norm, [T, hidden_size]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden_size] after the final norm -> float32 [R, vocab_size]."""

    @abstractmethod
    def rope_table(self) -> torch.Tensor:
        """float32 [max_positions, head_dim], see layers.rotary; drafters of the same geometry share it."""
