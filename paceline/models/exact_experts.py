"""Experts on a GPU, as exact products: a row's bits do not depend on what other rows its experts got."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.layers.by_expert import by_expert
from paceline.layers.exact_products import Grouping, Matrices, grouped_product
from paceline.layers.ops import silu_mul
from paceline.layers.quantized import LinearWeight
from paceline.models.quantization.fusing import fuse_layers

GATE_UP = ("gate_proj", "up_proj")
Biases = tuple[torch.Tensor | None, torch.Tensor | None]  # float32 [experts, ...] of gate and up, and of down


class ExactExperts:
    """All experts as two stacks of matrices. The host is never told how many rows an expert got."""

    def __init__(
        self,
        gate_up: Matrices,
        down: Matrices,
        activation: Callable[[torch.Tensor], torch.Tensor] = silu_mul,
        biases: Biases = (None, None),
    ) -> None:
        self._gate_up, self._down, self._activation, self._biases = gate_up, down, activation, biases
        self._num_experts = down.values.shape[0]

    @classmethod
    def load(cls, linear: Callable[[str], LinearWeight], prefix: str, num_experts: int) -> ExactExperts:
        """SwiGLU experts. linear: weights as the checkpoint has them, by their names within the layer."""

        def gate_up(i: int) -> LinearWeight:
            return fuse_layers({(name := f"{prefix}.experts.{i}.{n}"): linear(f"{name}.weight") for n in GATE_UP})

        def down(i: int) -> LinearWeight:
            return linear(f"{prefix}.experts.{i}.down_proj.weight")

        return cls(Matrices.stack(gate_up, num_experts), Matrices.stack(down, num_experts))

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden]; expert_ids: int64 [T, top_k] -> float32 [T, top_k, hidden]."""
        rows, top_k = expert_ids.shape
        sort = by_expert(expert_ids, self._num_experts)
        grouping = Grouping.of(sort.ends, rows * top_k, x.dtype, codes=self._gate_up.codes)
        gate_up = x.new_empty(rows * top_k, self._gate_up.shape[0])
        grouped_product(x, self._gate_up, self._biases[0], grouping, gate_up, sources=sort.sources)
        outputs = torch.empty(rows * top_k, self._down.shape[0], dtype=torch.float32, device=x.device)
        hidden = self._activation(gate_up)
        grouped_product(hidden, self._down, self._biases[1], grouping, outputs, targets=sort.order)
        return outputs.view(rows, top_k, -1)
