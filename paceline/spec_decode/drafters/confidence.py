"""What a draft candidate is worth: the chance that the target says it too. Trees are grown and cut by it.

Greedy drafts, and greedy requests: q of the candidate, as in EAGLE-2 (arXiv 2406.16858).

Coupled drafts of a sampled request are the first arrivals of a race, token i arriving at T_i = E_i / q_i, and the
target runs the race over p with the *same* E (algorithms.md B10). Given the arrivals, q_i is no longer the chance
that i wins: an unlikely token with a tiny E_i has won the drafter's race and will win the target's unless p is much
lower there. If the target's log p differs from log q by Gumbel errors of scale 1 / B, independent over tokens, then
token i wins with probability exactly T_i^-B / sum_j T_j^-B. The sum over the tokens that arrived after the last
candidate k follows from the race itself: what is left arrives as a Poisson stream of rate 1 - q_1 - ... - q_k from T_k
on, and sums to (1 - q_1 - ... - q_k) * T_k^(1-B) / (B - 1).

B = 2 fits drafters that are right in half to nine tenths of their first guesses. On random tables with drafters of
that quality the log loss of "which candidate, or none" is 0.5 to 1.1 nats, against 4 for q and 0.5 to 1.2 for the
best constants by rank, which would have to be fitted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from paceline.request import SamplingParams
from paceline.sampling.noise import exponential_noise


def log_values(
    ids: torch.Tensor, probs: torch.Tensor, params: Seq[SamplingParams], positions: Seq[int], *, coupled: bool
) -> torch.Tensor:
    """Log of the estimated acceptance of each candidate, float64 [R, width]; -inf where q is 0.

    ids: int64 [R, width], target ids, best first; probs: float32 [R, width], their q; both on the CPU. positions: of
    the candidates. coupled: the candidates of sampled requests come from the race over the target's noise.
    """
    values = probs.double().log()
    raced = [r for r, p in enumerate(params) if coupled and p.temperature > 0.0]
    if raced:
        seeds = [params[r].seed or 0 for r in raced]
        noise = exponential_noise(seeds, [positions[r] for r in raced], ids[raced])
        values[raced] = race_log_values(noise, probs[raced].double())
    return values


def race_log_values(noise: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """log of T_i^-2 / (sum_j T_j^-2 + (1 - sum q) / T_k). noise, probs: float64 [R, width] in order of arrival."""
    arrival = noise / probs
    # In units of the first arrival nothing overflows; a candidate that never arrives (q = 0) has share 0.
    shares = (arrival[:, :1] / arrival) ** 2
    left = (1.0 - probs.sum(dim=1)).clamp(min=0.0)
    missed = left * arrival[:, 0] * (arrival[:, 0] / arrival[:, -1])
    return (shares / (shares.sum(dim=1) + missed).unsqueeze(1)).log()
