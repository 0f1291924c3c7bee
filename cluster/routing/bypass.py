"""Whether a decode node computes a prompt itself: worth it for short ones, where it is measured to be faster.

Handing over costs a trip to the prefill node, its queue and the transfer; computing on the decode node makes its
running streams wait. Both are measured where they are felt, from reservation to first token, by class of uncached
prompt length. Every stream that runs there waits as long as a bypass takes, so its time counts once for each:

    bypass where  seconds(bypass) * (1 + running)  <  seconds(pair)

The decode node decides by what it really has cached (``DecodeRequest.local_prefill_up_to``); the router gives the
limit. One request of each class in ``TRIAL_EVERY`` goes the way that is not preferred, so that both stay measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MEASURED = -1  # ``--bypass-tokens``: decide by measurement
BOUNDS = (16, 32, 64, 128, 256, 512)  # classes of uncached prompt tokens; longer ones are what prefill nodes are for
SHARE = 0.1  # of the newest measurement in the mean
ENOUGH = 3  # measurements of a way before it is believed
TRIAL_EVERY = 32


@dataclass
class Way:
    """One way to the first token."""

    count: int = 0
    seconds: float = 0.0  # mean, the latest weigh most

    def add(self, seconds: float) -> None:
        """One measurement."""
        self.count += 1
        self.seconds += (seconds - self.seconds) * max(SHARE, 1 / self.count)


@dataclass
class _Class:
    bypass: Way = field(default_factory=Way)
    pair: Way = field(default_factory=Way)
    asked: int = 0

    def better(self, running: int) -> bool:
        if min(self.bypass.count, self.pair.count) < ENOUGH:
            return False
        return self.bypass.seconds * (1 + running) < self.pair.seconds


class Bypass:
    """Limits for one router's requests. tokens: ``--bypass-tokens``: 0 never, N always up to N, MEASURED."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._classes = {bound: _Class() for bound in BOUNDS}

    def limit(self, uncached: int, running: int) -> int:
        """Uncached tokens up to which the decode node is to prefill by itself; 0: not at all.

        uncached: prompt tokens that it probably has to compute; running: sequences there.
        """
        if self._tokens != MEASURED:
            return self._tokens
        bound = _bound(uncached)
        if bound is None:
            return 0
        known = self._classes[bound]
        known.asked += 1
        trial = known.asked % TRIAL_EVERY == 0 or (known.bypass.count < ENOUGH and known.asked % 2 == 0)
        return bound if known.better(running) != trial else 0

    def observe(self, uncached: int, bypassed: bool, seconds: float) -> None:
        """A first token came ``seconds`` after the reservation, of a prompt with so many uncached tokens."""
        bound = _bound(uncached)
        if bound is not None:
            known = self._classes[bound]
            (known.bypass if bypassed else known.pair).add(seconds)


def _bound(uncached: int) -> int | None:
    return next((bound for bound in BOUNDS if uncached <= bound), None)
