"""What a head is trained towards, and how good it is: cross-entropy to the target's distribution, per draft step.
A head whose output stands for a hidden row of the target (EAGLE-1) is held to that row too (C4, arXiv 2401.15077).

Labels come from the target's LM head on its own hidden rows, over the tokens trained on (``TargetParts.token_ids``);
columns whose actual token lies outside them are left out. Step weights decay (C7).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from draft_training.batch import Batch
from draft_training.cross_entropy import ROWS_AT_ONCE, linear_cross_entropy
from draft_training.heads import TargetParts, TrainableHead


@dataclass(frozen=True)
class Labels:
    """The target's view of the rows that columns predict. L distinct label rows."""

    probs: torch.Tensor  # [L, V'], softmax of the target over the tokens trained on
    slot: torch.Tensor  # int64 [R]: row -> its line in probs, -1 where it is nobody's label
    actual: torch.Tensor  # int64 [R], ids of the actual next tokens
    trained: torch.Tensor  # bool [R]: the actual next token is among the tokens trained on


@torch.no_grad()
def labels_of(batch: Batch, target: TargetParts) -> Labels:
    """Labels of ``batch``. Step s of the column at row i is judged by row i + 1 + s."""
    label_rows = batch.columns + 1  # the rows past these are label rows of other columns, or past the end
    slot = torch.full_like(batch.token_ids, -1)
    slot[label_rows] = torch.arange(len(label_rows), device=slot.device)
    rows = batch.final[label_rows]
    probs = rows.new_empty(len(rows), len(target.head))
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        torch.softmax(F.linear(rows[part], target.head), dim=-1, out=probs[part])
    return Labels(probs, slot, batch.following, target.columns[batch.following] >= 0)


def loss_of(
    head: TrainableHead, batch: Batch, target: TargetParts, labels: Labels, decay: float, count: int
) -> tuple[torch.Tensor, list[float]]:
    """Weighted loss and per-step loss of the first ``count`` draft steps. Mean over the trained columns of each."""
    outputs, actual = [], []
    for step, output in enumerate(head.steps(batch, target, count)):
        rows, exists = batch.rows(step + 1)
        here = (exists & (rows < batch.last) & labels.trained[rows]).nonzero().squeeze(1)
        outputs.append(output[here])
        actual.append(rows[here])
    counts = tuple(len(rows) for rows in actual)
    hidden, label = head.normed(torch.cat(outputs)), labels.slot[torch.cat(actual)]
    losses = linear_cross_entropy(hidden, head.scorer(target), labels.probs, label, counts)
    if head.feature_weight:
        pairs = zip(outputs, actual, strict=True)
        apart = [F.smooth_l1_loss(output.float(), batch.final[rows].float()) for output, rows in pairs]
        losses = losses + head.feature_weight * torch.stack(apart)
    weights = torch.tensor([decay**step for step in range(count)], dtype=losses.dtype, device=losses.device)
    return (losses * weights).sum() / weights.sum(), losses.detach().tolist()


@dataclass
class Acceptance:
    """Greedy acceptance of chains that start at every answer position."""

    starts: int
    accepted: list[int]  # per position: chains accepted that far

    @property
    def length(self) -> float:
        """Tokens per round, the bonus counted, were every position a round's start."""
        return 1.0 + sum(self.accepted) / max(self.starts, 1)

    @property
    def per_position(self) -> list[float]:
        """Share of chains accepted at each position given that all before were."""
        before = [self.starts, *self.accepted]
        return [now / max(was, 1) for now, was in zip(self.accepted, before, strict=False)]


@torch.no_grad()
def acceptance_of(head: TrainableHead, batch: Batch, target: TargetParts) -> Acceptance:
    """On greedy answers: a draft is right where its best token is the answer's own next token."""
    alive = batch.rows(1)[0] < batch.last
    result = Acceptance(int(alive.sum()), [])
    for step, output in enumerate(head.steps(batch, target, head.num_steps)):
        rows, exists = batch.rows(step + 1)
        best = target.token_ids[head.logits(step, output, target).argmax(-1)]
        alive = alive & exists & (rows < batch.last) & (best == batch.following[rows])
        result.accepted.append(int(alive.sum()))
    return result
