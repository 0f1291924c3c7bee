"""Rows of logits to tokens, for plain decoding, verification of a draft tree and drafting.

A row's token depends on that row alone: its logits, parameters, history, seed and position. Which other rows share the
call changes nothing, and neither does whether the row is a plain step or a node of a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.request import SamplingParams
from paceline.sampling.params import BoolArray, adjust, needs_adjust, needs_truncate, reads_history, truncate
from paceline.sampling.race import race
from paceline.sampling.topk import argmax_lowest, stable_topk


@dataclass(frozen=True)
class RowContext:
    """One row of logits: the distribution of the token at ``position``. The runner fills it, per node of a tree."""

    params: SamplingParams
    position: int  # absolute position of the token to sample
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # committed output so far
    path_token_ids: Sequence[int]  # draft ancestors of this node, root excluded: they count as output
    allowed: BoolArray | None = None  # [V], what a grammar allows here; None: no grammar

    @property
    def num_output(self) -> int:
        """Output tokens before this one."""
        return len(self.output_token_ids) + len(self.path_token_ids)


def sample_rows(logits: torch.Tensor, rows: Sequence[RowContext]) -> list[int]:
    """The token of each row. logits: float32 [R, V], any device, left as it is.

    Raises FloatingPointError when the best logit of a row is not finite (a broken forward must not become text),
    and ValueError when a row that samples has no seed.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} contexts")
    if not rows:
        return []
    logits = _adjusted(logits, rows)
    best = argmax_lowest(logits)
    _check_finite(logits.gather(1, best.unsqueeze(1)), rows)
    tokens: list[int] = best.tolist()
    groups: dict[tuple[int, float, float], list[int]] = {}
    for i, row in enumerate(rows):
        if row.params.temperature > 0.0:
            groups.setdefault(_limits(row.params), []).append(i)
    for limits, members in groups.items():
        drawn = _draw(_select(logits, members), [rows[i] for i in members], limits)
        for i, token in zip(members, drawn, strict=True):
            tokens[i] = token
    return tokens


def _adjusted(logits: torch.Tensor, rows: Sequence[RowContext]) -> torch.Tensor:
    """Logits after bias, penalties, minimum length and grammar; the same tensor when no row has any."""
    changed = [i for i, row in enumerate(rows) if row.allowed is not None or needs_adjust(row.params, row.num_output)]
    if not changed:
        return logits
    logits = logits.clone()
    for i in changed:
        logits[i] = _adjusted_row(logits[i], rows[i])
    return logits


def _adjusted_row(logits: torch.Tensor, row: RowContext) -> torch.Tensor:
    if reads_history(row.params):
        history = [*row.output_token_ids, *row.path_token_ids]
        return adjust(logits, row.params, row.prompt_token_ids, history, row.allowed)
    # Only the length matters: do not copy the history.
    return adjust(logits, row.params, (), range(row.num_output), row.allowed)


def _check_finite(best: torch.Tensor, rows: Sequence[RowContext]) -> None:
    for i, (logit,) in enumerate(best.tolist()):
        if not math.isfinite(logit):
            raise FloatingPointError(f"logits of row {i} (position {rows[i].position}) are not finite")


def _limits(params: SamplingParams) -> tuple[int, float, float]:
    """The (top_k, top_p, min_p) that rows must share to be cut in one pass; (0, 1, 0) cuts nothing."""
    return (params.top_k, params.top_p, params.min_p) if needs_truncate(params) else (0, 1.0, 0.0)


def _select(values: torch.Tensor, members: Sequence[int]) -> torch.Tensor:
    return values if len(members) == values.shape[0] else values[list(members)]


def _draw(logits: torch.Tensor, rows: Sequence[RowContext], limits: tuple[int, float, float]) -> list[int]:
    """One token for each of the rows that share ``limits``, all with a temperature above 0."""
    temperatures = [row.params.temperature for row in rows]
    seeds = [_seed(row.params) for row in rows]
    positions = [row.position for row in rows]
    if limits == (0, 1.0, 0.0):
        winners = race(logits, temperatures, seeds, positions)
    else:
        ids, scaled = truncate(logits, temperatures, *limits)
        winners = ids.gather(1, race(scaled, [1.0] * len(rows), seeds, positions, token_ids=ids))
    tokens: list[int] = winners.squeeze(1).tolist()
    return tokens


def _seed(params: SamplingParams) -> int:
    if params.seed is None:
        raise ValueError("a request that samples needs a seed by the time it reaches the sampler")
    return params.seed


def perturbed_topk(
    draft_logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    width: int,
    *,
    coupled: bool = True,
    token_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft candidates for the token at each row's position, best first.

    draft_logits: float32 [R, W], W the drafter's vocabulary. positions: absolute, of the proposed token.
    token_map: int64 [W], the target id of each draft id (EAGLE-3's reduced vocabulary); None: the same ids.
    Greedy rows propose the top-k logits. Sampled rows propose the first ``width`` of the race over
    q = softmax(logits / temperature) with the noise that the target will use there, so that a drafter equal to the
    target is always right; with ``coupled`` False, the top-k of q. Neither choice can change the text: the
    acceptance rule compares tokens alone (algorithms.md B5c, B7).

    Returns (target ids int64 [R, width], their q float32 [R, width]); greedy rows report q at temperature 1.
    """
    if not len(params) == len(positions) == draft_logits.shape[0]:
        raise ValueError("draft_logits, params and positions differ in their number of rows")
    temperatures = [p.temperature if p.temperature > 0.0 else 1.0 for p in params]
    raced = [i for i, p in enumerate(params) if coupled and p.temperature > 0.0]
    if len(raced) < len(params):
        columns = stable_topk(draft_logits, width)
    else:
        columns = torch.empty(len(params), width, dtype=torch.int64, device=draft_logits.device)
    if raced:
        columns[raced] = race(
            _select(draft_logits, raced),
            [temperatures[i] for i in raced],
            [_seed(params[i]) for i in raced],
            [positions[i] for i in raced],
            width,
            token_map,
        )
    probs = _softmax_at(draft_logits, temperatures, columns)
    return (columns if token_map is None else token_map[columns]), probs


def _softmax_at(logits: torch.Tensor, temperatures: Sequence[float], columns: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) at ``columns``, float32 [R, width]."""
    scale = torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / scale
    return torch.exp(scaled.gather(1, columns) - torch.logsumexp(scaled, dim=1, keepdim=True))
