"""From logits and sampling parameters to the distribution that a token is drawn from; pure functions.

Order and meaning are vLLM's: logit bias, repetition penalty (prompt and output), frequency and presence penalties
(output alone), minimum length, bad sequences (output alone), the mask of a grammar, temperature, then top-k, top-p,
min-p. Sets are cut deterministically: equal logits are ranked by the lowest id. Logits come in float32; penalties are
applied in float32, everything after the temperature in float64.

"Output" at a node of a draft tree is the committed output plus the node's own ancestors (algorithms.md B4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.request import SamplingParams
from paceline.sampling.topk import argmax_lowest, stable_topk

BoolArray = npt.NDArray[np.bool_]

# Probabilities down to which top-p looks for its set before it sorts, a step at a time.
_FIRST_THRESHOLD = 1e-3
_THRESHOLD_STEP = 16.0
_LAST_THRESHOLD = 1e-9
# A mass or ratio this close to its threshold has reached it, so that summation order never decides.
TOLERANCE = 1e-9


def has_penalty(params: SamplingParams) -> bool:
    """Whether the tokens of the history change the logits."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def reads_history(params: SamplingParams) -> bool:
    """Whether logits depend on which tokens came before, and not on their number alone."""
    return has_penalty(params) or bool(params.bad_token_ids)


def banned_tokens(params: SamplingParams, *history: Sequence[int]) -> set[int]:
    """Tokens that would complete a sequence of ``bad_token_ids``. history: the output before this token, in parts."""
    if not params.bad_token_ids:
        return set()
    longest = max(map(len, params.bad_token_ids)) - 1
    tail = [token for part in history for token in part[-longest:]][-longest:] if longest else []
    return {ids[-1] for ids in params.bad_token_ids if len(ids) == 1 or tail[-(len(ids) - 1) :] == list(ids[:-1])}


def needs_adjust(params: SamplingParams, num_output: int) -> bool:
    """Whether ``adjust`` would change anything, with ``num_output`` tokens of output before this one."""
    too_short = num_output < params.min_tokens and bool(params.stop_token_ids)
    return too_short or bool(params.logit_bias) or reads_history(params)


def needs_truncate(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p cut the distribution. Greedy never needs it: the best token always stays."""
    return params.temperature > 0.0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def adjust(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    allowed: BoolArray | None = None,
) -> torch.Tensor:
    """Everything before the temperature. logits: float32 [V], left as it is. Returns float32 [V], a copy.

    allowed: [V], the tokens that a grammar allows, at least one. Where it allows stop tokens alone, one of them comes
    whatever the minimum length is; where it allows nothing else, a token that completes a bad sequence comes too.
    """
    logits = logits.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
    if has_penalty(params):
        _penalise(logits, params, prompt_token_ids, output_token_ids)
    stops = list(params.stop_token_ids)
    shut = stops if len(output_token_ids) < params.min_tokens and not _only(stops, allowed) else []
    if shut:
        logits[shut] = -math.inf
    banned = sorted(banned_tokens(params, output_token_ids))
    if banned and not _only(banned + shut, allowed):
        logits[banned] = -math.inf
    if allowed is not None:
        logits.masked_fill_(~torch.from_numpy(allowed).to(logits.device), -math.inf)
    return logits


def _only(tokens: list[int], allowed: BoolArray | None) -> bool:
    """Whether a grammar allows nothing but these."""
    return allowed is not None and int(allowed.sum()) == int(allowed[list(set(tokens))].sum())


def _penalise(
    logits: torch.Tensor, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
) -> None:
    """Repetition (Keskar et al. 2019, CTRL; once per distinct token), then frequency and presence, in place."""
    output = torch.tensor(output_token_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1.0:
        prompt = torch.tensor(prompt_token_ids, dtype=torch.int64, device=logits.device)
        seen = torch.cat((prompt, output))  # repeats write the same value again
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        counts = torch.bincount(output, minlength=logits.shape[0])[output].to(logits.dtype)
        logits[output] = logits[output] - (params.frequency_penalty * counts + params.presence_penalty)


def truncate(
    logits: torch.Tensor, temperatures: Sequence[float], top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperature, then top-k, top-p, min-p, for rows that share the three limits.

    logits: float32 [R, V]; temperatures: R numbers > 0. Returns (ids int64 [R, C], scaled float64 [R, C]), best
    first: scaled is (logit - max) / temperature, and -inf for a candidate that is cut or fills up a row; C is as large
    as the longest row needs. Top-p keeps the smallest set whose mass reaches p, the token that crosses it included; its
    mass is taken after top-k, as in vLLM. Min-p keeps p_i >= min_p * p_max.
    """
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)
    if 0 < top_k < logits.shape[1]:
        ids = stable_topk(logits, top_k)
        values = logits.gather(1, ids).double()
        scaled = (values - values[:, :1]) / scale
        mass = scaled.exp().sum(dim=1, keepdim=True)
    else:
        everything = (logits.double() - logits.amax(dim=1, keepdim=True)) / scale
        weights = everything.exp()
        mass = weights.sum(dim=1, keepdim=True)
        candidates = _reaches(everything, min_p)
        if top_p < 1.0:
            candidates = candidates & _superset_of_mass(weights, mass, top_p)
        ids, scaled = _gather_sorted(everything, candidates)
    keep = torch.ones_like(scaled, dtype=torch.bool)
    if top_p < 1.0:
        probs = scaled.exp() / mass
        keep = probs.cumsum(dim=1) - probs < top_p - TOLERANCE
        keep[:, 0] = True
    if min_p > 0.0:
        keep = keep & _reaches(scaled, min_p)
    return ids, scaled.masked_fill(~keep, -math.inf)


def _superset_of_mass(weights: torch.Tensor, mass: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask of the tokens above some weight, holding at least top_p of each row's mass: all that need be sorted."""
    threshold = _FIRST_THRESHOLD
    while threshold > _LAST_THRESHOLD:
        mask = weights >= threshold * mass
        if bool(((weights * mask).sum(dim=1, keepdim=True) >= mass * top_p).all()):
            return mask
        threshold /= _THRESHOLD_STEP
    return torch.ones_like(weights, dtype=torch.bool)


def _gather_sorted(scaled: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and scaled logits of the masked entries of each row, best first, ties by the lowest id; short rows are
    padded with id 0 and -inf."""
    counts = mask.sum(dim=1)
    rows, columns = mask.nonzero(as_tuple=True)
    slots = torch.arange(len(rows), device=mask.device) - (counts.cumsum(dim=0) - counts)[rows]
    shape = (scaled.shape[0], int(counts.amax()))
    ids = torch.zeros(shape, dtype=torch.int64, device=mask.device)
    values = torch.full(shape, -math.inf, dtype=scaled.dtype, device=mask.device)
    ids[rows, slots] = columns
    values[rows, slots] = scaled[rows, columns]
    values, order = values.sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


def _reaches(scaled: torch.Tensor, min_p: float) -> torch.Tensor:
    """Where p_i >= min_p * p_max, of scaled logits whose maximum is 0."""
    threshold = math.log(min_p) if min_p > 0.0 else -math.inf
    return scaled >= threshold - TOLERANCE


def process(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
) -> torch.Tensor:
    """Log-probabilities that the token is drawn from, -inf where excluded; greedy puts all mass on one token.

    logits: float32 [V], or [R, V] for rows with the same parameters and history. Returns float64, same shape.
    """
    if logits.dim() == 1:
        return process(logits.unsqueeze(0), params, prompt_token_ids, output_token_ids).squeeze(0)
    if needs_adjust(params, len(output_token_ids)):
        logits = torch.stack([adjust(row, params, prompt_token_ids, output_token_ids) for row in logits])
    if params.temperature == 0.0:
        log_probs = torch.full_like(logits, -math.inf, dtype=torch.float64)
        return log_probs.scatter_(1, argmax_lowest(logits).unsqueeze(1), 0.0)
    temperatures = [params.temperature] * logits.shape[0]
    if not needs_truncate(params):
        gaps = logits.double() - logits.amax(dim=1, keepdim=True)
        return torch.log_softmax(gaps / params.temperature, dim=1)
    ids, scaled = truncate(logits, temperatures, params.top_k, params.top_p, params.min_p)
    log_probs = torch.full_like(logits, -math.inf, dtype=torch.float64)
    return log_probs.scatter_reduce_(1, ids, torch.log_softmax(scaled, dim=1), "amax")  # padding repeats id 0
