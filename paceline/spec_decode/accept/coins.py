"""Coins of the acceptance rules that do not draw with the target's own noise (algorithms.md B1, B5a, B6, C3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.request import UINT64_MAX
from paceline.sampling.noise import noise_bits_few

COIN_STREAM = 0x5851D6B8A3C94E27  # keys the coins: independent of the target's noise and of DRAFT_STREAM


class CoinSource(Protocol):
    """Randomness of the rules that do not use the target's own. (position, draw) names a coin; a rule throws it once.

    ``position`` is the absolute position of the token being decided.
    """

    def flip(self, probability: float, position: int, draw: int) -> bool:
        """True with ``probability`` (1 or more: always)."""

    def pick(self, probs: torch.Tensor, position: int, draw: int) -> int:
        """A token drawn from float64 probs [V] that sum to 1."""


@dataclass(frozen=True)
class Coins:
    """Coins keyed by (request seed, absolute position, draw): no generator state, as in ``sampling.noise``."""

    seed: int  # the request's, unsigned 64-bit

    def uniform(self, position: int, draw: int) -> float:
        """A number in [0, 1) with 53 random bits. position: unsigned 32-bit; draw: 0 to 2**31 - 1."""
        key = (self.seed ^ COIN_STREAM) & UINT64_MAX
        high, low = noise_bits_few(key, position, (2 * draw, 2 * draw + 1))
        return float((high >> 5) * 2**26 + (low >> 6)) * 2.0**-53

    def flip(self, probability: float, position: int, draw: int) -> bool:
        """True with ``probability``."""
        return self.uniform(position, draw) < probability

    def pick(self, probs: torch.Tensor, position: int, draw: int) -> int:
        """Draw a token by inverse cumulative sum over the support, so that a token of probability 0 cannot come out.

        Raises FloatingPointError when probs hold no finite mass.
        """
        support = probs.nonzero().squeeze(1)
        cumulative = probs[support].cumsum(0)
        total = float(cumulative[-1]) if len(support) else 0.0
        if not 0.0 < total < math.inf:
            raise FloatingPointError(f"no token to pick at position {position}: the probabilities sum to {total}")
        # The product stays under ``total``, a uniform being at most 1 - 2**-53; so there is an entry above it.
        return int(support[torch.searchsorted(cumulative, self.uniform(position, draw) * total, right=True)])
