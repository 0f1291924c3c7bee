"""Which experts a row goes to, and how much each counts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; with softmax
scores Qwen3-MoE and gpt-oss)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from paceline.layers.build import load_kernels
from paceline.triton_support import runs_triton


@dataclass(frozen=True)
class RoutingRule:
    """Group-limited choice of experts."""

    num_groups: int  # experts lie in groups of equal size, at least 2
    top_groups: int  # groups that a row may use, best by the sum of their two best experts
    top_k: int  # experts of a row
    normalise: bool  # weights of a row sum to ``factor``
    factor: float
    softmax: bool = False  # scores are a softmax of all logits (normalised: of the chosen ones), not sigmoids


def route_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: RoutingRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as ``route`` in torch; of equal scores, which wins is torch's to say."""
    rows, num_experts = logits.shape
    scores = logits.softmax(dim=-1) if rule.softmax else logits.sigmoid()
    choice = logits if rule.softmax else scores if bias is None else scores + bias
    grouped = choice.view(rows, rule.num_groups, num_experts // rule.num_groups)
    worth = grouped.topk(2, dim=-1).values.sum(dim=-1)
    closed = torch.ones_like(worth, dtype=torch.bool).scatter_(1, worth.topk(rule.top_groups, dim=-1).indices, False)
    choice = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).view(rows, num_experts)
    expert_ids = choice.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if rule.normalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return expert_ids, weights * rule.factor


def route(logits: torch.Tensor, bias: torch.Tensor | None, rule: RoutingRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of each row, best first, and their weights.

    logits: float32 [T, num_experts], contiguous; bias: float32 [num_experts], added to sigmoid scores for the choice
    alone; None for softmax scores. Returns int64 [T, top_k] and float32 [T, top_k]. The lower index wins a tie. A row's
    result does not depend on other rows; torch's sigmoid on a CPU does (its last elements are computed another way).
    """
    library = load_kernels() if logits.device.type == "cpu" else None
    if library is None:
        if runs_triton(logits.device):
            from paceline.layers import experts_triton

            return experts_triton.route(logits, bias, **asdict(rule))
        return route_reference(logits, bias, rule)
    rows, num_experts = logits.shape
    expert_ids = torch.empty(rows, rule.top_k, dtype=torch.int64)
    weights = torch.empty(rows, rule.top_k, dtype=torch.float32)
    library.pl_route(
        logits.data_ptr(), rows, num_experts, None if bias is None else bias.data_ptr(), rule.num_groups,
        rule.top_groups, rule.top_k, int(rule.normalise), rule.factor, int(rule.softmax),
        expert_ids.data_ptr(), weights.data_ptr(),
    )  # fmt: skip
    return expert_ids, weights
