"""Mixture of experts with shared experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), row by row the same however
rows are batched: every product goes through ``Linear``, and a row's experts are summed best first, in float32."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.layers.linear import Linear, fuse
from paceline.layers.ops import silu_mul
from paceline.layers.routing import RoutingRule, route
from paceline.models.deepseek_config import MoeSpec

Take = Callable[[str], torch.Tensor]  # a layer's weight by its name within the layer


class SwiGlu:
    """down(silu(gate(x)) * up(x)). One expert, the shared experts, or a dense layer's MLP."""

    def __init__(self, take: Take, prefix: str, out_float32: bool = False) -> None:
        self.gate_up_proj = Linear(fuse([take(f"{prefix}.{name}.weight") for name in ("gate_proj", "up_proj")]))
        self.down_proj = Linear(take(f"{prefix}.down_proj.weight"), out_float32=out_float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class MoeMlp:
    """Routed experts and shared experts of one layer."""

    def __init__(self, spec: MoeSpec, take: Take, prefix: str = "mlp") -> None:
        self.spec = spec
        self.rule = RoutingRule(spec.num_groups, spec.top_groups, spec.top_k, spec.normalise, spec.factor)
        self.router = Linear(take(f"{prefix}.gate.weight").float())  # scores that nearly tie need every bit
        self.bias = take(f"{prefix}.gate.e_score_correction_bias").float().contiguous()
        self.experts = [SwiGlu(take, f"{prefix}.experts.{i}", out_float32=True) for i in range(spec.num_experts)]
        self.shared = SwiGlu(take, f"{prefix}.shared_experts", out_float32=True) if spec.num_shared_experts else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        expert_ids, weights = route(self.router(x.float()), self.bias, self.rule)
        outputs = self._routed(x, expert_ids) * weights.unsqueeze(-1)
        total = outputs[:, 0]
        for i in range(1, self.spec.top_k):  # not sum(): the order of additions is part of the result
            total = total + outputs[:, i]
        if self.shared is not None:
            total = total + self.shared(x)
        return total.to(x.dtype)

    def _routed(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """expert_ids: int64 [T, top_k] -> float32 [T, top_k, hidden], each expert run once over all its rows."""
        rows, top_k = expert_ids.shape
        flat = expert_ids.view(-1)
        order = flat.argsort(stable=True)
        counts: list[int] = torch.bincount(flat, minlength=self.spec.num_experts).tolist()
        gathered = torch.split_with_sizes(x[order // top_k], counts)
        outputs = torch.empty(rows * top_k, x.shape[1], dtype=torch.float32, device=x.device)
        parts = [expert(part) for expert, part in zip(self.experts, gathered, strict=True) if part.shape[0]]
        outputs[order] = torch.cat(parts)
        return outputs.view(rows, top_k, -1)
