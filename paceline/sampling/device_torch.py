"""The sampler's device operations in torch alone, without host synchronisation: the reference of ``kernels_triton``,
and what runs where Triton is missing. It sorts whole rows and holds float64 [R, V] temporaries."""

from __future__ import annotations

import math

import torch

from paceline.sampling.noise import noise_bits_keyed
from paceline.sampling.packing import (
    FLOOR,
    KEY,
    MASS_LIMIT,
    NO_LIMIT,
    OUTPUT,
    OWN,
    PROMPT,
    TEMPERATURE,
    TOP_K,
    DeviceRows,
)


def noise(ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The noise of one row. ids: int32 [V]; keys: int32 [2]. Returns int64 [V] of 32-bit values."""
    return noise_bits_keyed(keys.to(torch.int64).view(1, 2), ids.to(torch.int64))[0]


def adjust(logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """A copy of logits float32 [R, V] with bias, penalties and minimum length applied."""
    edited = logits.clone()
    words = rows.words.to(torch.int64)
    tokens = rows.edits[:, 0].to(torch.int64)
    add, repetition, subtract = (rows.edits[:, i].contiguous().view(torch.float32) for i in (1, 2, 3))
    at = torch.arange(rows.edits.shape[0], device=logits.device)
    for which in (PROMPT, OUTPUT, OWN):
        for row in range(logits.shape[0]):
            # The length is fixed, so that the host need not know it: entries of other lists go nowhere.
            mine = (at >= words[row, which]) & (at < words[row, which + 1])
            value = logits[row, tokens] + add
            value = torch.where(value > 0, (value.double() / repetition).float(), (value.double() * repetition).float())
            value = torch.where(subtract == math.inf, -math.inf, value - subtract)
            spill = edited.new_empty(logits.shape[1] + 1)
            spill[:-1] = edited[row]
            spill[torch.where(mine, tokens, logits.shape[1])] = value
            edited[row] = spill[:-1]
    return edited


def sample(logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """Tokens of adjusted logits float32 [R, V]: int64 [R]; -1 where the best logit is not finite."""
    temperatures = rows.numbers[:, TEMPERATURE]
    scores = _scores(logits, rows.words[:, KEY : KEY + 2], temperatures, None)
    greedy = (temperatures == 0.0).unsqueeze(1)
    scores = torch.where(greedy | _kept(logits, rows), scores, math.inf)
    tokens = scores.argmin(dim=1)
    finite = logits.amax(dim=1).isfinite()  # amax passes NaN on
    return torch.where(finite, tokens, -1)


def topk(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor,
    width: int,
    token_map: torch.Tensor | None,
    raced: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``device.race_topk`` of checked arguments."""
    ranked_by = temperatures if raced else torch.zeros_like(temperatures)
    scores = _scores(logits, keys, ranked_by, token_map)
    columns = scores.sort(dim=1, stable=True).indices[:, :width]
    scale = torch.where(temperatures > 0.0, temperatures, 1.0).to(torch.float32).unsqueeze(1)
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / scale
    probs = torch.exp(scaled.gather(1, columns) - torch.logsumexp(scaled, dim=1, keepdim=True))
    return (columns if token_map is None else token_map[columns]), probs


def _scores(
    logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, token_map: torch.Tensor | None
) -> torch.Tensor:
    """float64 [R, V], the lowest is first: of the race where T > 0, else -logit."""
    ids = torch.arange(logits.shape[1], device=logits.device) if token_map is None else token_map.to(torch.int64)
    bits = noise_bits_keyed(keys.to(torch.int64), ids)
    values = logits.double()
    scale = temperatures.double().unsqueeze(1)
    gap = values.amax(dim=1, keepdim=True) - values
    race = -torch.log((bits.double() + 0.5) * 2.0**-32) * torch.exp(gap / torch.where(scale > 0.0, scale, 1.0))
    return torch.where(scale > 0.0, race, -values)


def _kept(logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """Which tokens top-k, top-p and min-p leave: bool [R, V]; ``params.truncate`` of each row."""
    numbers = rows.numbers.unsqueeze(1)  # [R, 1, columns]
    temperatures = numbers[..., TEMPERATURE]
    values, ids = logits.sort(dim=1, descending=True, stable=True)
    values = values.double()
    scaled = (values - values[:, :1]) / torch.where(temperatures > 0.0, temperatures, 1.0)
    top_k = rows.words[:, TOP_K].unsqueeze(1)
    rank = torch.arange(logits.shape[1], device=logits.device)
    kept = (top_k == 0) | (rank < top_k)
    weights = torch.where(kept, scaled.exp(), 0.0)
    probs = weights / weights.sum(dim=1, keepdim=True)
    limit = numbers[..., MASS_LIMIT]
    kept &= (limit == NO_LIMIT) | (probs.cumsum(dim=1) - probs < limit) | (rank == 0)
    kept &= scaled >= numbers[..., FLOOR]
    return torch.zeros_like(kept).scatter_(1, ids, kept)
