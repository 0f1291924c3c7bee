"""The target's law at one row, for the acceptance rules that compare probabilities (algorithms.md B4)."""

from __future__ import annotations

import torch

from paceline.request import SamplingParams
from paceline.sampling.params import adjust, needs_adjust, process, reads_history
from paceline.sampling.sampler import RowContext
from paceline.sampling.topk import argmax_lowest


def target_probs(logits: torch.Tensor, row: RowContext) -> torch.Tensor:
    """The distribution that ``sample_rows`` draws this row's token from; at temperature 0 all mass is on its token.

    logits: float32 [V], any device, left as it is. Penalties and grammar see the committed output and the row's own
    path. Returns float64 [V], same device, summing to 1. Raises FloatingPointError where ``sample_rows`` does: when
    the best adjusted logit is not finite.
    """
    if row.allowed is not None or needs_adjust(row.params, row.num_output):
        logits = adjust(logits, row.params, row.prompt_token_ids, _history(row), row.allowed)
    best = logits[argmax_lowest(logits.unsqueeze(0))]
    if not bool(best.isfinite()):
        raise FloatingPointError(f"logits at position {row.position} are not finite")
    return process(logits, _cuts(row.params)).exp()


def _history(row: RowContext) -> list[int] | range:
    """Output before this token; its length alone where nothing reads it."""
    if reads_history(row.params):
        return [*row.output_token_ids, *row.path_token_ids]
    return range(row.num_output)


def _cuts(params: SamplingParams) -> SamplingParams:
    """What remains to do after ``adjust``."""
    return SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
