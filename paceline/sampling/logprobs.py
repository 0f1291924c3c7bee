"""Log-probabilities that a client sees: of the model's own distribution, before any parameter (vLLM's default)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.request import TokenLogprobs
from paceline.sampling.topk import stable_topk


def token_logprobs(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probability of ``token_id`` and the ``top`` best alternatives, best first, ties by the lowest id.

    logits: float32 [V], unprocessed. ``top`` may be 0, and is cut to V.
    """
    return row_logprobs(logits[None], [token_id], top)[0]


def row_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """``token_logprobs`` of each row and its token. A row's result does not depend on other rows.

    logits: float32 [R, V], unprocessed; token_ids: R of them.
    """
    log_probs = torch.log_softmax(logits.double(), dim=1)
    chosen = log_probs[range(len(token_ids)), list(token_ids)].tolist()
    top = min(top, logits.shape[1])
    if top == 0:
        return [TokenLogprobs(logprob) for logprob in chosen]
    ids = stable_topk(logits, top)
    best = zip(chosen, ids.tolist(), log_probs.gather(1, ids).tolist(), strict=True)
    return [TokenLogprobs(logprob, tuple(of_row), tuple(values)) for logprob, of_row, values in best]
