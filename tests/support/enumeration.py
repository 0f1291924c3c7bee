"""Exact laws of random programs, and what the enumeration tests share (algorithms.md J1).

A round is a program that asks ``choose`` for every random outcome; ``law`` runs it over all outcomes and adds up their
probabilities. ``deviation`` compares whole generations with the target's joint law, with no sampling error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from paceline.request import SamplingParams
from paceline.sampling.params import process

Tokens = tuple[int, ...]
Probs = tuple[float, ...]
Choose = Callable[[Sequence[float]], int]
EXACT = 1e-12
MISCOUNTED: Tokens = (-1,)

PENALISED = SamplingParams(repetition_penalty=1.8, frequency_penalty=0.7, presence_penalty=0.3, temperature=0.8)
CUT = SamplingParams(temperature=0.7, top_k=3, top_p=0.9)


def law(program: Callable[[Choose], Tokens]) -> dict[Tokens, float]:
    """The exact law of a program's result. Outcomes of probability 0 are not explored."""
    total: dict[Tokens, float] = {}
    pending: list[list[int]] = [[]]
    while pending:
        script = pending.pop()
        made: list[int] = []
        weight = 1.0

        def choose(probs: Sequence[float], script: list[int] = script, made: list[int] = made) -> int:
            nonlocal weight
            options = [i for i, p in enumerate(probs) if p > 0]
            if len(made) < len(script):
                pick = script[len(made)]
            else:
                pick = options[0]
                pending.extend([*made, other] for other in options[1:])
            made.append(pick)
            weight *= probs[pick]
            return pick

        result = program(choose)
        total[result] = total.get(result, 0.0) + weight
    return total


def total_variation(a: dict[Tokens, float], b: dict[Tokens, float]) -> float:
    return 0.5 * math.fsum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys())


@cache
def _table(vocab_size: int, key: Tokens) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A law asks for the same few tables thousands of times."""
    made = np.random.default_rng(key).normal(size=vocab_size) * 1.5
    made.flags.writeable = False
    return made


@dataclass
class Model:
    """Random tables: target logits and draft probabilities that depend on the whole prefix."""

    vocab_size: int
    seed: int
    params: SamplingParams = field(default_factory=SamplingParams)
    draft_is_target: bool = False
    cache: dict[tuple[Tokens, Tokens], Probs] = field(default_factory=dict)
    drafts: dict[Tokens, Probs] = field(default_factory=dict)

    def table(self, prefix: Tokens, salt: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return _table(self.vocab_size, (self.seed, salt, *prefix))

    def p(self, prefix: Tokens, history: Tokens | None = None) -> Probs:
        """Processed target distribution after ``prefix``; ``history`` is what penalties see, the prefix itself."""
        history = prefix if history is None else history
        if (prefix, history) not in self.cache:
            logits = torch.tensor(self.table(prefix, 0), dtype=torch.float32)
            self.cache[prefix, history] = tuple(process(logits, self.params, (), history).exp().tolist())
        return self.cache[prefix, history]

    def q(self, prefix: Tokens) -> Probs:
        """Draft distribution: the target's, disturbed."""
        if self.draft_is_target:
            return self.p(prefix)
        if prefix not in self.drafts:
            weights = np.exp(self.table(prefix, 0) * 0.5 + self.table(prefix, 1) * 0.5)
            self.drafts[prefix] = tuple((weights / weights.sum()).tolist())
        return self.drafts[prefix]


# A round: (model, output so far, tokens that may still come, choose) -> (draft tokens accepted, tokens committed)
Round = Callable[[Model, Tokens, int, Choose], tuple[int, Tokens]]


def deviation(round_: Round, model: Model, length: int, stop: int | None = None) -> float:
    """Total variation between the law of generations by rounds and the target's joint law.

    A generation ends at ``stop`` or at ``length`` tokens. A round that does not commit its accepted tokens and
    exactly one more (A3) counts as an outcome that the target never gives.
    """

    def ended(out: Tokens) -> bool:
        return len(out) >= length or (stop is not None and stop in out)

    def by_rounds(choose: Choose) -> Tokens:
        out: Tokens = ()
        while not ended(out):
            accepted, tokens = round_(model, out, length - len(out), choose)
            if len(tokens) != accepted + 1:
                return MISCOUNTED
            out += tokens
        return out[:length]

    def plain(choose: Choose) -> Tokens:
        out: Tokens = ()
        while not ended(out):
            out += (choose(model.p(out)),)
        return out

    return total_variation(law(by_rounds), law(plain))


def ranked(probs: Probs) -> list[int]:
    return sorted(range(len(probs)), key=lambda i: (-probs[i], i))


def normalised(weights: Sequence[float]) -> Probs:
    total = math.fsum(weights)
    return tuple(w / total for w in weights)
