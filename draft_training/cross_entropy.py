"""Cross-entropy of a linear layer's scores to a target distribution, with the gradient made in the forward pass.

On CPU the scores of a draft vocabulary are most of a training step's memory traffic. So they are made a few rows at a
time and are gone before the next: what is kept is the gradient of the layer's input and, where the layer itself is
trained, that of the scores. All draft steps of a batch go through one call, which makes the layer's gradient once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

ROWS_AT_ONCE = 256  # scores stay in cache, and the matrix products are still large enough to be fast


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        probs: torch.Tensor,
        label: torch.Tensor,
        counts: tuple[int, ...],
    ) -> torch.Tensor:
        size, wide = hidden.shape[0], torch.promote_types(hidden.dtype, torch.float32)
        train_weight = ctx.needs_input_grad[1]
        keep = hidden.new_empty(size if train_weight else min(size, ROWS_AT_ONCE), weight.shape[0])
        grad_hidden = torch.empty_like(hidden)
        log_sum = torch.empty(size, dtype=wide, device=hidden.device)
        best = probs.argmax(dim=-1, keepdim=True)
        for start in range(0, size, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, size))
            gradient = keep[rows] if train_weight else keep[: rows.stop - start]
            scores = F.linear(hidden[rows], weight)
            torch.softmax(scores, dim=-1, out=gradient)
            # log(sum(exp)) from one column, the label's best: softmax = exp(score) / sum
            column = best[label[rows]]
            share = gradient.gather(1, column).to(wide).clamp_(min=torch.finfo(wide).tiny)
            log_sum[rows] = (scores.gather(1, column).to(wide) - share.log_()).squeeze(1)
            gradient.sub_(probs.index_select(0, label[rows]))
            torch.mm(gradient, weight, out=grad_hidden[rows])
        # sum over v of p_v score_v = hidden . (sum over v of p_v weight_v): no walk over the scores
        crossed = ((probs @ weight).index_select(0, label).to(wide) * hidden).sum(dim=-1)
        ctx.save_for_backward(grad_hidden, hidden, keep if train_weight else None)
        ctx.counts = counts
        return torch.stack(
            [part.sum() / max(len(part), 1) for part in torch.split_with_sizes(log_sum - crossed, counts)]
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, hidden, gradient = ctx.saved_tensors
        counts = torch.tensor(ctx.counts, device=hidden.device)
        share = (grads[0] / counts.clamp(min=1)).repeat_interleave(counts, output_size=len(hidden))
        share = share.unsqueeze(1).to(hidden.dtype)
        grad_weight = None
        if gradient is not None:
            grad_weight = ((hidden * share).t().contiguous() @ gradient).t()  # twice as fast as the other way round
        return grad_hidden * share, grad_weight, None, None, None


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, probs: torch.Tensor, label: torch.Tensor, counts: tuple[int, ...]
) -> torch.Tensor:
    """Mean of -sum p log softmax(weight @ h) over each of several runs of rows.

    Args:
        hidden: [R, H], of all runs one after another.
        weight: [V', H].
        probs: [L, V'], rows that sum to 1; has no gradient.
        label: int64 [R], the line of ``probs`` that a row is held to.
        counts: rows of each run, R together. The mean of an empty run is 0.

    Returns:
        [len(counts)] in float32 at least.
    """
    losses: torch.Tensor = cast(Any, _LinearCrossEntropy).apply(hidden, weight, probs, label, counts)
    return losses
