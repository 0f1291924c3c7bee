"""The coins of the acceptance rules: uniform, keyed, and independent of every other stream (algorithms.md J2)."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.request import UINT64_MAX
from paceline.sampling.noise import all_ids, noise_bits_rows
from paceline.spec_decode.accept.coins import COIN_STREAM, Coins
from paceline.spec_decode.drafters.candidates import DRAFT_STREAM
from tests.support.goodness_of_fit import chi_square, ks_uniform

P_FAIL = 1e-4
SEEDS = range(2_000)
POSITIONS = range(5)
KEYS = list(product(SEEDS, POSITIONS))

Floats = npt.NDArray[np.float64]


def uniforms(draw: int) -> Floats:
    """One coin for each of KEYS."""
    return np.array([Coins(seed).uniform(position, draw) for seed, position in KEYS])


def noise(stream: int, token_id: int) -> Floats:
    """The noise of one token under the same keys, as a number in [0, 1)."""
    seeds, positions = zip(*KEYS, strict=True)
    bits = noise_bits_rows([seed ^ stream for seed in seeds], positions, all_ids(8))
    return bits[:, token_id].astype(np.float64) * 2.0**-32


def independent(a: Floats, b: Floats) -> bool:
    """Neither a linear relation nor any that shows in an 8 by 8 table."""
    if abs(np.corrcoef(a, b)[0, 1]) > 4 / np.sqrt(len(a)):
        return False
    counts = np.bincount((a * 8).astype(np.int64) * 8 + (b * 8).astype(np.int64), minlength=64)
    return chi_square(counts, np.full(64, 1 / 64)) > P_FAIL


def test_the_ks_test_has_its_table_values() -> None:
    grid = (np.arange(1000) + 0.5) / 1000
    assert ks_uniform(grid) == 1.0
    assert ks_uniform(np.clip(grid + 1.358 / np.sqrt(1000), 0, 1)) == pytest.approx(0.05, abs=0.01)
    assert ks_uniform(grid**1.4) < P_FAIL


@pytest.mark.parametrize("draw", [0, 1, 7, 2**31 - 1])
def test_coins_are_uniform(draw: int) -> None:
    values = uniforms(draw)
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert ks_uniform(values) > P_FAIL
    low_bits = (values * 2.0**32) % 1.0  # past the 32 bits of one noise word
    assert ks_uniform(low_bits) > P_FAIL


@pytest.mark.parametrize("stream", [0, DRAFT_STREAM], ids=["target", "draft"])
@pytest.mark.parametrize("draw", [0, 1])
def test_coins_know_nothing_of_the_noise(draw: int, stream: int) -> None:
    coins = uniforms(draw)
    assert all(independent(coins, noise(stream, token_id)) for token_id in range(8))


def test_the_check_of_independence_has_teeth() -> None:
    """A coin of a stream is that stream's noise of tokens 2 * draw and 2 * draw + 1."""
    assert not independent(uniforms(1), noise(COIN_STREAM, 2))


def test_neighbouring_coins_are_independent() -> None:
    values = np.array([uniforms(draw) for draw in range(4)]).reshape(4, len(SEEDS), len(POSITIONS))
    assert independent(values[:-1].ravel(), values[1:].ravel())  # draws
    assert independent(values[:, :-1].ravel(), values[:, 1:].ravel())  # seeds
    assert independent(values[:, :, :-1].ravel(), values[:, :, 1:].ravel())  # positions


def test_coins_are_keyed_and_keep_no_state() -> None:
    coins = Coins(7)
    first = coins.uniform(3, 1)
    assert first == coins.uniform(3, 1) == Coins(7).uniform(3, 1)
    others = [Coins(8).uniform(3, 1), coins.uniform(4, 1), coins.uniform(3, 0), Coins(7 + 2**32).uniform(3, 1)]
    assert len({first, *others}) == 5


def test_golden_values() -> None:
    """Frozen: a change here changes the text of every request under a rule that throws coins."""
    assert [Coins(seed).uniform(position, draw).hex() for seed, position, draw in GOLDEN] == list(GOLDEN.values())


GOLDEN = {
    (0, 0, 0): "0x1.b88c3e371c140p-3",
    (1234, 56, 1): "0x1.8edafdfb1c2dcp-1",
    (UINT64_MAX, 2**32 - 1, 2**31 - 1): "0x1.4e0ef8a32fcc0p-4",
}


def test_flips_come_with_their_probability() -> None:
    heads = sum(Coins(seed).flip(0.3, position, 2) for seed, position in KEYS)
    assert chi_square(np.array([heads, len(KEYS) - heads]), np.array([0.3, 0.7])) > P_FAIL
    assert all(Coins(seed).flip(1.0, 0, 0) and not Coins(seed).flip(0.0, 0, 0) for seed in SEEDS)


def test_picks_follow_their_probabilities() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.05, 0.25, 0.0], dtype=torch.float64)
    picks = [Coins(seed).pick(probs, position, 3) for seed, position in KEYS]
    assert chi_square(np.bincount(picks, minlength=7), probs.numpy()) > P_FAIL


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_pick_stays_in_the_support(u: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coins, "uniform", lambda self, position, draw: u)
    thirds = torch.tensor([0.0, 1 / 3, 1 / 3, 0.0, 1 / 3, 0.0], dtype=torch.float64)
    assert Coins(0).pick(thirds, 0, 0) == {0.0: 1, 0.5: 2}.get(u, 4)
    assert Coins(0).pick(torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), 0, 0) == 1
    tenths = torch.full((10,), 0.1, dtype=torch.float64)  # their running sum ends below 1
    assert Coins(0).pick(tenths, 0, 0) == {0.0: 0, 0.5: 4}.get(u, 9)


def test_a_boundary_belongs_to_the_token_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals are half open, as the uniform number is: [0, .5) is token 0."""
    monkeypatch.setattr(Coins, "uniform", lambda self, position, draw: 0.5)
    assert Coins(0).pick(torch.tensor([0.5, 0.5], dtype=torch.float64), 0, 0) == 1
    assert not Coins(0).flip(0.5, 0, 0)


@pytest.mark.parametrize("probs", [[0.0, 0.0], [0.5, float("nan")], [float("inf"), 0.0]])
def test_nothing_to_pick_is_an_error(probs: list[float]) -> None:
    with pytest.raises(FloatingPointError, match="position 4"):
        Coins(0).pick(torch.tensor(probs, dtype=torch.float64), 4, 0)
