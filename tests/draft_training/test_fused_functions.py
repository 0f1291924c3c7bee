"""Functions with a gradient of their own, against torch's autograd of the plain formula."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from draft_training.cross_entropy import ROWS_AT_ONCE, linear_cross_entropy
from draft_training.layers import RmsNorm, rotate

torch.set_num_threads(1)
COUNTS = (ROWS_AT_ONCE + 9, 0, 40)  # one run longer than what is done at once, and an empty one


def plain_losses(hidden: torch.Tensor, weight: torch.Tensor, probs: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    log_q = torch.log_softmax(F.linear(hidden, weight), dim=-1)
    parts = torch.split_with_sizes(-(probs[label] * log_q).sum(-1), COUNTS)
    return torch.stack([part.sum() / max(len(part), 1) for part in parts])


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    rows = sum(COUNTS)
    hidden, weight, probs = (torch.randn(*s, generator=generator) for s in ((rows, 24), (57, 24), (31, 57)))
    label = torch.randint(31, (rows,), generator=generator)
    return hidden.to(dtype), weight.to(dtype), torch.softmax(2 * probs, -1).to(dtype), label


@pytest.mark.parametrize("train_weight", [True, False])
def test_cross_entropy_and_its_gradients(train_weight: bool) -> None:
    hidden, weight, probs, label = problem(torch.float64)
    inputs = [hidden.requires_grad_(), *([weight.requires_grad_()] if train_weight else [])]
    scale = torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64)
    mine, theirs = (
        linear_cross_entropy(hidden, weight, probs, label, COUNTS),
        plain_losses(hidden, weight, probs, label),
    )
    torch.testing.assert_close(mine, theirs)
    for found, expected in zip(
        torch.autograd.grad((mine * scale).sum(), inputs),
        torch.autograd.grad((theirs * scale).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_cross_entropy_in_bf16_is_near_that_in_float64() -> None:
    exact = problem(torch.float64)
    hidden, weight, probs, label = (t.bfloat16() if t.is_floating_point() else t for t in exact)
    mine = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), probs, label, COUNTS)
    theirs = plain_losses(exact[0].requires_grad_(), exact[1].requires_grad_(), exact[2], label)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(mine.double(), theirs, rtol=2e-3, atol=1e-6)
    for found, expected in zip(
        torch.autograd.grad(mine.sum(), (hidden, weight)),
        torch.autograd.grad(theirs.sum(), exact[:2]),
        strict=True,
    ):
        assert float((found - expected).norm() / expected.norm()) < 0.01


def test_cross_entropy_is_finite_where_a_label_has_no_chance() -> None:
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    probs, label = torch.tensor([[0.0, 1.0]]), torch.zeros(1, dtype=torch.int64)
    loss = linear_cross_entropy(hidden, torch.tensor([[1.0], [-1.0]]), probs, label, (1,))
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert bool(loss.isfinite().all())
    assert float(gradient) == pytest.approx(2.0)


def test_rms_norm_and_its_gradients() -> None:
    norm = RmsNorm(12, 1e-5).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 7, 12, dtype=torch.float64, requires_grad=True)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight
    torch.testing.assert_close(norm(x), plain)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))
    half = x.detach().bfloat16()
    expected = (half.float() * torch.rsqrt(half.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    torch.testing.assert_close(RmsNorm(12, 1e-5).bfloat16()(half), expected)


def test_rotation_and_its_gradient() -> None:
    angles = torch.randn(9, 4, dtype=torch.float64)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    x, positions = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True), torch.tensor([3, 0, 8, 1, 1])
    a, b = x.chunk(2, -1)
    cos, sin = (part.unsqueeze(1) for part in table[positions].chunk(2, -1))
    torch.testing.assert_close(rotate(x, table, positions), torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    assert torch.autograd.gradcheck(lambda x: rotate(x, table, positions), x)
