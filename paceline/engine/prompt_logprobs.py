"""Log-probabilities of a prompt's own tokens, from the hidden rows of a chunk that is computed anyway.

The logits of a whole chunk would be large: 1,024 rows of a vocabulary of 49,152 are 200 MB. They are made and used in
pieces of ``LOGITS_ROWS``, so that a step holds at most ``LOGITS_ROWS * 4 + SOFTMAX_ROWS * 16`` bytes for each token of
the vocabulary, whatever the prompt's length: 25 MB of that one.
"""

from __future__ import annotations

import torch

from paceline.models.base import TargetModel
from paceline.sampling.logprobs import row_logprobs
from paceline.spec_decode.sequence import Sequence

LOGITS_ROWS = 64  # rows of float32 logits at once: one pass over the output matrix
SOFTMAX_ROWS = 16  # rows of float64 logits and probabilities at once


def add_prompt_logprobs(model: TargetModel, seq: Sequence, start: int, hidden: torch.Tensor) -> None:
    """Append to ``seq.prompt_logprobs`` what the rows of a chunk say of the tokens that follow them in the prompt.

    hidden: [T, hidden_size], rows start..start+T-1 after the final norm. Rows whose next token is no part of the prompt
    are left out. Nothing happens when the request does not ask.
    """
    top, prompt = seq.request.params.prompt_logprobs, seq.request.prompt_token_ids
    if top is None:
        return
    following = prompt[start + 1 : start + 1 + hidden.shape[0]]
    for at in range(0, len(following), LOGITS_ROWS):
        logits = model.logits(hidden[at : min(at + LOGITS_ROWS, len(following))])
        for first in range(0, logits.shape[0], SOFTMAX_ROWS):
            rows = logits[first : first + SOFTMAX_ROWS]
            tokens = following[at + first : at + first + rows.shape[0]]
            seq.prompt_logprobs += row_logprobs(rows, tokens, top)
