"""Makes candidate tokens from a drafter's logits, in the three ways of ``DraftSampling``."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from paceline.request import UINT64_MAX, SamplingParams
from paceline.sampling.device import draft_topk, race_topk, upload_races
from paceline.sampling.sampler import perturbed_topk
from paceline.spec_decode.base import DraftSampling

DRAFT_STREAM = 0xD1B54A32D192ED03  # keys the noise of SAMPLED drafts: independent of the target's own


@dataclass(frozen=True)
class Candidates:
    """The best tokens after R nodes, best (or first drawn) first; ids of the target's vocabulary. They are on the
    logits' device, and on a GPU perhaps not computed yet."""

    ids: torch.Tensor  # int64 [R, width]
    probs: torch.Tensor  # float32 [R, width], q of each
    full: torch.Tensor | None  # SAMPLED: float32 [R, vocab_size], the q they were drawn from; else None


def choose(
    draft_logits: torch.Tensor,
    params: Seq[SamplingParams],
    positions: Seq[int],
    width: int,
    how: DraftSampling,
    vocab_size: int,
    token_map: torch.Tensor | None = None,
) -> Candidates:
    """Candidates for ``positions`` from draft_logits [R, Vd], float32.

    token_map: int64 [Vd], column -> target id, for a reduced draft vocabulary; None: Vd is ``vocab_size``, or wider
    (a padded head), and columns past it are never proposed. ``width`` is capped by Vd.
    """
    if token_map is None and draft_logits.shape[1] > vocab_size:
        draft_logits = draft_logits[:, :vocab_size]
    width = min(width, draft_logits.shape[1])
    if how is DraftSampling.SAMPLED:
        params = [replace(p, seed=((p.seed or 0) ^ DRAFT_STREAM) & UINT64_MAX) for p in params]
    coupled = how is not DraftSampling.GREEDY
    best = perturbed_topk if draft_logits.device.type == "cpu" else draft_topk
    ids, probs = best(draft_logits, params, positions, width, coupled=coupled, token_map=token_map)
    full = None
    if how is DraftSampling.SAMPLED:
        full = _full(draft_logits, params, vocab_size, token_map)
    return Candidates(ids, probs, full)


def choose_ahead(
    draft_logits: torch.Tensor,
    params: Seq[SamplingParams],
    starts: Seq[int],
    ahead: torch.Tensor,
    most: int,
    width: int,
    how: DraftSampling,
    vocab_size: int,
    token_map: torch.Tensor | None,
) -> Candidates:  # as ``choose``, with positions in two parts
    """``choose`` for positions that the device alone knows, on the device: starts + ahead, where ahead, int64 [R], is
    0 to ``most``. Not for SAMPLED."""
    if token_map is None and draft_logits.shape[1] > vocab_size:
        draft_logits = draft_logits[:, :vocab_size]
    width = min(width, draft_logits.shape[1])
    coupled = how is not DraftSampling.GREEDY
    raced = coupled and any(p.temperature for p in params)
    places = range(most + 1 if raced else 1)
    seeds = [p.seed or 0 for p in params for _ in places]
    keys, temperatures = upload_races(
        seeds, [start + i for start in starts for i in places], [p.temperature for p in params], draft_logits.device
    )
    if raced:
        first = torch.arange(0, len(seeds), len(places), device=draft_logits.device)
        keys = keys.index_select(0, first + ahead)
    ids, probs = race_topk(draft_logits, keys, temperatures, width, token_map, coupled=coupled)
    return Candidates(ids, probs, None)


def _full(
    draft_logits: torch.Tensor, params: Seq[SamplingParams], vocab_size: int, token_map: torch.Tensor | None
) -> torch.Tensor:
    """q over the target's vocabulary at each row's temperature; zero outside the draft vocabulary (C6)."""
    temperatures = torch.tensor([p.temperature if p.temperature > 0.0 else 1.0 for p in params])
    q = torch.softmax(draft_logits.float() / temperatures.to(draft_logits.device).unsqueeze(1), dim=-1)
    if token_map is None:
        return q if q.shape[1] == vocab_size else torch.nn.functional.pad(q, (0, vocab_size - q.shape[1]))
    return q.new_zeros(q.shape[0], vocab_size).index_copy_(1, token_map, q)
