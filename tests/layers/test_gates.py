"""Norms with float32 weights and the gated activations of Gemma 3 and gpt-oss, against torch and row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.layers.ops import (
    add_rms_norm,
    add_rms_norm_reference,
    clamped_swiglu,
    clamped_swiglu_reference,
    gelu_mul,
    gelu_mul_reference,
)
from paceline.layers.routing import RoutingRule, route, route_reference
from tests.support.needs import needs_kernels

pytestmark = needs_kernels

Gate = Callable[[torch.Tensor], torch.Tensor]
GATES: dict[str, tuple[Gate, Gate]] = {
    "gelu": (gelu_mul, gelu_mul_reference),
    "clamped": (lambda x: clamped_swiglu(x, 1.7, 1.0), lambda x: clamped_swiglu_reference(x, 1.7, 1.0)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, dtype: torch.dtype) -> None:
    """Widths of whole vectors and not: every row as it is alone."""
    kernel, reference = GATES[gate]
    for width in (16, 37):
        x = (torch.randn(9, 2 * width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
        got = kernel(x)
        limit = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(got, reference(x), rtol=limit, atol=limit)
        assert torch.equal(torch.cat([kernel(row[None]) for row in x]), got)


def test_a_norm_with_a_float32_weight_rounds_once() -> None:
    """Mutant: the normed row is rounded to bf16 before the weight, as other models do."""
    generator = torch.Generator().manual_seed(2)
    x, residual = (torch.randn(9, 100, generator=generator).bfloat16() for _ in range(2))
    weight = 1 + 0.3 * torch.randn(100, generator=generator)
    ours, theirs, twice = (residual.clone() for _ in range(3))
    got, expected = add_rms_norm(x, ours, weight, 1e-6), add_rms_norm_reference(x, theirs, weight, 1e-6)
    assert torch.equal(ours, theirs)
    differs = (got != expected).float().mean()
    assert differs < 0.01  # where float32's last bits decide how bf16 rounds
    rounded = (add_rms_norm(x, twice, torch.ones(100).bfloat16(), 1e-6).float() * weight).bfloat16()
    assert (rounded != expected).float().mean() > 0.1
    alone = [add_rms_norm(x[i : i + 1], residual[i : i + 1].clone(), weight, 1e-6) for i in range(9)]
    assert torch.equal(torch.cat(alone), got)


@pytest.mark.parametrize("normalise", [True, False])
def test_routes_by_softmax(normalise: bool) -> None:
    """Weights of the chosen are a softmax of them, or their share of all."""
    rule = RoutingRule(1, 1, 3, normalise, 1.0, softmax=True)
    logits = torch.randn(40, 21, generator=torch.Generator().manual_seed(4)) * 3
    ids, weights = route(logits, None, rule)
    expected_ids, expected = route_reference(logits, None, rule)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    chosen = logits.topk(3).values
    torch.testing.assert_close(expected, chosen.softmax(-1) if normalise else chosen.exp() / logits.exp().sum(-1, True))
    alone = [route(row[None], None, rule)[1] for row in logits]
    assert torch.equal(torch.cat(alone), weights)
