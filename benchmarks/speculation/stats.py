"""From what single prompts did to one row per drafter and category; pure.

Acceptance length counts tokens committed per round, the bonus token included (algorithms.md G6). Costs are in plain
steps: seconds of a round of ``none`` in the same run and category. A round is its drafting and the rest, which is
verification, so that ``speedup == acceptance_length / (draft_cost + verify_cost)`` (algorithms.md I1, measured).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from benchmarks.speculation.drafter_specs import BASELINE
from benchmarks.speculation.prompts import group_order

ALL = "all"  # category of the row over every prompt
RESAMPLES = 2000
INTERVAL = (2.5, 97.5)  # percentiles


@dataclass(frozen=True)
class Record:
    """One prompt, or one turn of it, under one drafter."""

    drafter: str  # label of the DraftRun
    case: str
    category: str
    prompt_tokens: int
    output_tokens: int  # the first, which prefill samples, included
    prefill_s: float
    decode_s: float
    draft_s: float  # of decode_s
    draft_tokens: int
    accepted_per_round: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    rounds_by_drafter: dict[str, int]  # where a deployment chooses among several
    first_difference: int | None  # output index of the first token that is not ``none``'s; None: all are equal

    @property
    def decode_tokens(self) -> int:
        """Tokens that rounds committed."""
        return self.output_tokens - 1

    @property
    def rounds(self) -> int:
        """Draft-verify rounds."""
        return len(self.accepted_per_round)


@dataclass(frozen=True)
class Summary:
    """One drafter on one category. Ratios whose divisor is 0 are 0."""

    drafter: str
    category: str
    prompts: int
    tokens: int  # decoded
    rounds: int
    acceptance_length: float
    accepted_per_position: tuple[float, ...]  # share of all rounds that accepted a token at depth 1, 2, ...
    tokens_per_s: float  # all tokens over all seconds
    median_tokens_per_s: float  # of the prompts
    speedup: float  # tokens/s over none's
    speedup_low: float  # its 95 % interval, prompts resampled
    speedup_high: float
    draft_cost: float  # of one round, in plain steps
    verify_cost: float  # the rest of the round, in plain steps
    unequal: int  # prompts whose tokens are not none's


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None when the texts are equal."""
    for i, (ours, theirs) in enumerate(zip_longest(tokens, reference)):
        if ours != theirs:
            return i
    return None


def summarise(records: Sequence[Record]) -> list[Summary]:
    """One row by category, then drafter in order of appearance; the rows over all prompts come last."""
    drafters = list(dict.fromkeys(r.drafter for r in records))
    rows = []
    for category in [*group_order(r.category for r in records), ALL]:
        chosen = [r for r in records if category in (r.category, ALL)]
        baseline = {r.case: r for r in chosen if r.drafter == BASELINE}
        rows += [_summary(name, category, [r for r in chosen if r.drafter == name], baseline) for name in drafters]
    return rows


def _summary(drafter: str, category: str, records: list[Record], baseline: dict[str, Record]) -> Summary:
    plain = [baseline[r.case] for r in records]
    seconds, tokens = sum(r.decode_s for r in records), sum(r.decode_tokens for r in records)
    rounds = sum(r.rounds for r in records)
    step = ratio(sum(r.decode_s for r in plain), sum(r.rounds for r in plain))
    drafting = sum(r.draft_s for r in records)
    by_depth = zip_longest(*(r.accepted_per_position for r in records), fillvalue=0)
    low, high = speedup_interval(_work(records), _work(plain))
    return Summary(
        drafter=drafter,
        category=category,
        prompts=len(records),
        tokens=tokens,
        rounds=rounds,
        acceptance_length=ratio(rounds + sum(sum(r.accepted_per_round) for r in records), rounds),
        accepted_per_position=tuple(ratio(sum(column), rounds) for column in by_depth),
        tokens_per_s=ratio(tokens, seconds),
        median_tokens_per_s=statistics.median(ratio(r.decode_tokens, r.decode_s) for r in records),
        speedup=speedup(_work(records), _work(plain)),
        speedup_low=low,
        speedup_high=high,
        draft_cost=ratio(ratio(drafting, rounds), step),
        verify_cost=ratio(ratio(seconds - drafting, rounds), step),
        unequal=sum(r.first_difference is not None for r in records),
    )


def ratio(numerator: float, denominator: float) -> float:
    """Quotient; 0 when nothing was counted."""
    return numerator / denominator if denominator else 0.0


Work = Sequence[tuple[float, float]]  # (tokens, seconds) of each prompt


def _work(records: list[Record]) -> list[tuple[float, float]]:
    return [(r.decode_tokens, r.decode_s) for r in records]


def speedup(ours: Work, plain: Work) -> float:
    """Tokens/s over plain decoding's; with equal tokens that is the ratio of total decode seconds."""
    return ratio(_rate(ours), _rate(plain))


def _rate(work: Work) -> float:
    return ratio(sum(tokens for tokens, _ in work), sum(seconds for _, seconds in work))


def speedup_interval(ours: Work, plain: Work, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of ``speedup`` over prompts: row i of both is the same prompt, and they are drawn
    together. With fewer than two prompts it is the value itself."""
    if len(ours) < 2:
        value = speedup(ours, plain)
        return value, value
    draws = np.random.default_rng(seed).integers(len(ours), size=(resamples, len(ours)))
    sums = np.array([*zip(*ours, strict=True), *zip(*plain, strict=True)], dtype=np.float64)[:, draws].sum(axis=-1)
    tokens, seconds, plain_tokens, plain_seconds = sums  # each [resamples]
    usable = (seconds > 0) & (plain_tokens > 0)
    if not usable.any():
        return 0.0, 0.0
    ratios = (tokens * plain_seconds)[usable] / (seconds * plain_tokens)[usable]
    low, high = np.percentile(ratios, INTERVAL)
    return float(low), float(high)
