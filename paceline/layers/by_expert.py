"""Rows put together by the experts that they go to, on the device: the host is never told how many an expert got."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.triton_support import runs_triton


@dataclass(frozen=True)
class ByExpert:
    """The choices of T rows, R = T * top_k of them, sorted by expert; those of one expert in the order of the rows."""

    order: torch.Tensor  # int64 [R], the choice at each place, counted row by row
    sources: torch.Tensor  # int64 [R], its row
    experts: torch.Tensor  # int64 [R], its expert
    ends: torch.Tensor  # int32 [num_experts], past each expert's last place

    def in_rows(self, sorted_rows: torch.Tensor, top_k: int) -> torch.Tensor:
        """sorted_rows: [R, width], contiguous -> float32 [T, top_k, width], each where its choice stands."""
        out = torch.empty(sorted_rows.shape, dtype=torch.float32, device=sorted_rows.device)
        if runs_triton(out.device):
            from paceline.layers import experts_triton

            experts_triton.put_rows(sorted_rows, self.order, out)
        else:
            out[self.order] = sorted_rows.float()
        return out.view(-1, top_k, out.shape[1])


def by_expert(expert_ids: torch.Tensor, num_experts: int) -> ByExpert:
    """expert_ids: int64 [T, top_k], contiguous, each below ``num_experts``."""
    if runs_triton(expert_ids.device):
        from paceline.layers import experts_triton

        return ByExpert(*experts_triton.by_expert(expert_ids, num_experts))
    return by_expert_reference(expert_ids, num_experts)


def by_expert_reference(expert_ids: torch.Tensor, num_experts: int) -> ByExpert:
    """The same in torch."""
    flat = expert_ids.view(-1)
    order = flat.argsort(stable=True)
    experts = flat[order]
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device), right=True, out_int32=True)
    return ByExpert(order, order // expert_ids.shape[1], experts, ends)
