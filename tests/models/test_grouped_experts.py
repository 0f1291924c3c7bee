"""Experts whose rows are not counted on the host, against experts run one by one."""

from __future__ import annotations

import pytest
import torch

from paceline.models.gpt_oss import ExpertWeights, GroupedClampedExperts, SeparateClampedExperts
from paceline.models.moe import GroupedExperts, SeparateExperts
from tests.support.recording import plain_torch
from tests.support.tolerance import Tolerance

EXPERTS, HIDDEN, WIDE = 6, 32, 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_equal_to_separate_experts(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    shapes = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
    tensors = {
        f"mlp.experts.{i}.{name}.weight": (torch.randn(shape, generator=generator) * 0.2).to(dtype)
        for i in range(EXPERTS)
        for name, shape in shapes.items()
    }
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    expert_ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:3] for _ in range(rows)])  # one is idle
    with plain_torch():
        separate, grouped = (kind(tensors.__getitem__, "mlp", EXPERTS) for kind in (SeparateExperts, GroupedExperts))
    close: Tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(grouped(x, expert_ids), separate(x, expert_ids), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_separate_experts_of_gpt_oss(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {
        "gate_up_proj": (EXPERTS, HIDDEN, 2 * WIDE),
        "down_proj": (EXPERTS, WIDE, HIDDEN),
    }
    shapes |= {"gate_up_proj_bias": (EXPERTS, 2 * WIDE), "down_proj_bias": (EXPERTS, HIDDEN)}
    tensors = {
        f"mlp.experts.{name}": (torch.randn(shape, generator=generator) * 0.2).to(dtype)
        for name, shape in shapes.items()
    }
    x = torch.randn(7, HIDDEN, generator=generator).to(dtype)
    expert_ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:3] for _ in range(7)])
    weights = ExpertWeights(tensors.__getitem__, mxfp4=False, dtype=dtype)
    separate, grouped = (kind(weights, EXPERTS, (1.7, 0.5)) for kind in (SeparateClampedExperts, GroupedClampedExperts))
    close: Tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(grouped(x, expert_ids), separate(x, expert_ids), **close)
