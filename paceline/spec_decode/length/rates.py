"""How likely a draft is accepted at each depth, given that the depth before was (algorithms.md B9, G6).

Acceptance falls with position, so there is one rate per depth. A request is young for most of its life: its own rates
are shrunk to those of the whole deployment. A depth that was never tried takes the deviation of the depth before it,
which is hopeful on purpose: a length that looks good gets tried, and then is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

REQUEST_DECAY = 0.95  # a request's own counts remember some 20 trials
POOL_DECAY = 0.995  # the deployment's remember some 200
REQUEST_PRIOR = 8.0  # trials that the deployment's rate counts as, in a request's
POOL_PRIOR = 4.0  # trials that the assumption counts as, in the deployment's
ASSUMED_RATE = 0.65  # before anything was seen
LOWEST, HIGHEST = 0.01, 0.99
WIDER = 0.85  # assumed: twice the candidates per depth leave this share of the failures


@dataclass
class DepthCounts:
    """Decayed hits and trials per depth; index d is depth d+1."""

    decay: float
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)

    def add(self, tree_depth: int, accepted: int) -> None:
        """One round: depths up to the first refusal were tried, as far as the tree went."""
        tried = min(tree_depth, accepted + 1)
        missing = tried - len(self.hits)
        self.hits.extend([0.0] * missing)
        self.trials.extend([0.0] * missing)
        for d in range(tried):
            self.hits[d] = self.decay * self.hits[d] + (d < accepted)
            self.trials[d] = self.decay * self.trials[d] + 1.0

    def shrunk(self, d: int, prior: float, weight: float) -> float:
        """The rate at depth d+1, with ``prior`` counted as ``weight`` trials."""
        hits, trials = (self.hits[d], self.trials[d]) if d < len(self.hits) else (0.0, 0.0)
        return (hits + weight * prior) / (trials + weight)


class WidthCounts:
    """``DepthCounts`` for each number of candidates per depth (1 is a chain): few, as widths halve."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.by_width: dict[int, DepthCounts] = {}

    def add(self, width: int, tree_depth: int, accepted: int) -> None:
        """See DepthCounts."""
        self.by_width.setdefault(width, DepthCounts(self.decay)).add(tree_depth, accepted)


def pool_rates(pool: WidthCounts, width: int, depth: int) -> list[float]:
    """The deployment's rates for depths 1..depth; a width never tried is guessed from the nearest that was."""
    counts = pool.by_width.get(width)
    if counts is None and pool.by_width:
        nearest = min(pool.by_width, key=lambda w: (max(w, width) / min(w, width), w))
        doublings = math.log2(width / nearest)
        return [clamp(1 - (1 - rate) * WIDER**doublings) for rate in pool_rates(pool, nearest, depth)]
    counts = counts or DepthCounts(POOL_DECAY)
    rates: list[float] = []
    for d in range(depth):
        rates.append(counts.shrunk(d, rates[-1] if rates else ASSUMED_RATE, POOL_PRIOR))
    return rates


def request_rates(own: WidthCounts, pool: Seq[float], width: int) -> list[float]:
    """One request's rates for depths 1..len(pool), shrunk to the deployment's ``pool``."""
    counts = own.by_width.get(width)
    hits, trials = (counts.hits, counts.trials) if counts is not None else ([], [])
    rates: list[float] = []
    deviation, known = 0.0, len(hits)
    for d, rate in enumerate(pool):  # every sequence of a batch, every round: `clamp` and `shrunk`, written out
        expected = rate + deviation
        expected = LOWEST if expected < LOWEST else HIGHEST if expected > HIGHEST else expected
        if d < known:
            expected = (hits[d] + REQUEST_PRIOR * expected) / (trials[d] + REQUEST_PRIOR)
        rates.append(expected)
        deviation = expected - rate
    return rates


def reach(rates: Seq[float]) -> tuple[float, ...]:
    """P(the accepted path gets to depth d), d = 1..: the expected tokens that each depth adds."""
    out: list[float] = []
    for rate in rates:
        out.append((out[-1] if out else 1.0) * rate)
    return tuple(out)


def clamp(rate: float) -> float:
    """Into the open interval: a rate of 0 or 1 would never be doubted again."""
    return min(max(rate, LOWEST), HIGHEST)
