"""Log-probabilities that a client sees: of the model's own distribution, before any parameter (vLLM's default)."""

from __future__ import annotations

import torch

from paceline.request import TokenLogprobs
from paceline.sampling.topk import stable_topk


def token_logprobs(logits: torch.Tensor, token_id: int, top: int) -> TokenLogprobs:
    """Log-probability of ``token_id`` and the ``top`` best alternatives, best first, ties by the lowest id.

    logits: float32 [V], unprocessed. ``top`` may be 0, and is cut to V.
    """
    log_probs = torch.log_softmax(logits.double(), dim=0)
    top = min(top, logits.shape[0])
    if top == 0:
        return TokenLogprobs(logprob=float(log_probs[token_id]))
    ids = stable_topk(logits.unsqueeze(0), top)[0]
    return TokenLogprobs(
        logprob=float(log_probs[token_id]),
        top_ids=tuple(ids.tolist()),
        top_logprobs=tuple(log_probs[ids].tolist()),
    )
