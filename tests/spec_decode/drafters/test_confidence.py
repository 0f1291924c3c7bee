"""What a candidate is worth (``confidence``): against counted outcomes on random tables."""

from __future__ import annotations

import math

import torch

from paceline.request import SamplingParams
from paceline.sampling.noise import exponential_noise
from paceline.spec_decode.drafters.confidence import log_values, race_log_values


def outcomes(sigma: float, width: int = 4, contexts: int = 3000, vocab: int = 300) -> tuple[torch.Tensor, ...]:
    """A drafter that knows the logits up to Gaussian errors of ``sigma``; target and drafter race on the same noise.
    Noise and q of the first arrivals, and which of them the target says (``width``: none)."""
    generator = torch.Generator().manual_seed(3)
    sharpness = torch.exp(0.9 + 0.5 * torch.randn(contexts, 1, generator=generator))
    logits = torch.randn(contexts, vocab, generator=generator, dtype=torch.float64) * sharpness
    errors = sigma * torch.randn(contexts, vocab, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(1), (logits + errors).softmax(1)
    noise = -torch.rand(contexts, vocab, generator=generator, dtype=torch.float64).log()
    first = (noise / q).argsort(dim=1)[:, :width]
    hit = first == (noise / p).argmin(dim=1, keepdim=True)
    found = torch.where(hit.any(1), hit.int().argmax(1), width)
    return noise.gather(1, first), q.gather(1, first), found


def log_loss(values: torch.Tensor, found: torch.Tensor) -> float:
    full = torch.cat((values, 1.0 - values.sum(1, keepdim=True)), dim=1).clamp(1e-6, 1.0)
    return float(-full.gather(1, found[:, None]).log().mean())


def test_race_values_tell_better_than_q_and_than_ranks() -> None:
    for sigma in (0.4, 0.7, 1.0):
        noise, q, found = outcomes(sigma)
        by_rank = torch.bincount(found, minlength=5)[:4].double() / found.shape[0]  # fitted to these very outcomes
        loss = log_loss(race_log_values(noise, q).exp(), found)
        assert loss < 0.4 * log_loss(q, found)
        assert loss < log_loss(by_rank.expand(found.shape[0], 4), found) + 0.05


def test_race_values_are_calibrated() -> None:
    """Where the first candidate is said to be right about x of the time, it is, within a tenth or so."""
    noise, q, found = outcomes(0.7)
    first = race_log_values(noise, q).exp()[:, 0]
    for low in (0.2, 0.4, 0.6, 0.8):
        inside = (first >= low) & (first < low + 0.2)
        assert int(inside.sum()) > 50
        assert abs(float((found[inside] == 0).double().mean()) - float(first[inside].mean())) < 0.15


def test_rows_are_of_their_own_kind() -> None:
    ids = torch.tensor([[4, 9, 1]] * 3)
    probs = torch.tensor([[0.2, 0.5, 0.0]] * 3)
    params = [SamplingParams(temperature=t, seed=5) for t in (0.0, 1.0, 0.7)]
    plain = log_values(ids, probs, params, [7, 7, 7], coupled=False)
    assert torch.equal(plain, probs.double().log())
    coupled = log_values(ids, probs, params, [7, 7, 8], coupled=True)
    assert torch.equal(coupled[0], plain[0])
    noise = exponential_noise([5, 5], [7, 8], ids[1:])
    assert torch.equal(coupled[1:], race_log_values(noise, probs[1:].double()))
    assert coupled[:, 2].tolist() == [-math.inf] * 3


def test_race_values_are_a_sub_probability_in_order_of_arrival() -> None:
    noise, q, _ = outcomes(0.5, width=6, contexts=200)
    values = race_log_values(noise, q).exp()
    assert bool((values.diff(dim=1) <= 0).all())
    assert bool((values.sum(dim=1) <= 1 + 1e-12).all())
    sure = race_log_values(torch.tensor([[3.0]]).double(), torch.tensor([[1.0]]).double())
    assert sure.tolist() == [[0.0]]
