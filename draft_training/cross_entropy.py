"""Cross-entropy of bf16 scores to a target distribution, with the gradient made in the forward pass.

On CPU the scores of a draft vocabulary are most of a training step's memory traffic: torch's own form converts them to
float32, keeps them, and walks them four more times.
"""

from __future__ import annotations

from typing import Any

import torch

ROWS_AT_ONCE = 128  # float32 scratch stays in cache


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        gradient = torch.empty_like(scores)
        total = torch.zeros((), device=scores.device)
        for start in range(0, scores.shape[0], ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            log_q = torch.log_softmax(scores[rows].float(), dim=-1)
            wanted = probs[rows].float()
            total -= (wanted * log_q).sum()
            gradient[rows] = log_q.exp_().sub_(wanted).to(scores.dtype)
        ctx.save_for_backward(gradient)
        return total / max(scores.shape[0], 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (grads[0] / max(gradient.shape[0], 1)).to(gradient.dtype), None


def soft_cross_entropy(scores: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Mean over rows of -sum p log softmax(scores). scores, probs: [R, V'] -> float32 scalar. probs has no gradient."""
    loss: torch.Tensor = _SoftCrossEntropy.apply(scores, probs)  # type: ignore[no-untyped-call]
    return loss
