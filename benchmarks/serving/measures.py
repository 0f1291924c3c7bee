"""What a run's outcomes say: percentiles, and goodput under an objective."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.serving.client import Outcome


@dataclass(frozen=True)
class Objective:
    """What a request must meet to count as good."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Record:
    """One request, as kept in the results. Latencies count from the moment it was due."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    late_ms: float
    ttft_ms: float | None  # None: no token came
    tpot_ms: float | None  # None: fewer than two tokens
    e2e_ms: float | None  # None: failed
    gaps_ms: tuple[float, ...]  # between events with text; with speculation one event may bring several tokens
    digest: str  # of the text
    error: str  # empty: completed


@dataclass(frozen=True)
class Summary:
    """All requests of one setting at one rate. Milliseconds; NaN stands for a figure that no request gave."""

    requests: int
    completed: int
    failed: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    gap_p99: float
    e2e_p50: float
    e2e_p99: float
    tokens_per_s: float
    good: int
    goodput_per_s: float
    late_p99: float

    @property
    def goodput(self) -> float:
        """Share of all requests that meet the objective."""
        return self.good / self.requests


def record(outcome: Outcome) -> Record:
    """What is kept of an outcome."""
    stamps = outcome.stamps
    tpot = None
    if outcome.output_tokens > 1 and len(stamps) > 1:
        tpot = (stamps[-1] - stamps[0]) / (outcome.output_tokens - 1) * 1e3
    return Record(
        number=outcome.ask.number,
        at_s=round(outcome.ask.at_s, 4),
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        late_ms=round(outcome.late_s * 1e3, 2),
        ttft_ms=round(stamps[0] * 1e3, 2) if stamps else None,
        tpot_ms=round(tpot, 3) if tpot is not None else None,
        e2e_ms=None if outcome.error else round(outcome.end_s * 1e3, 2),
        gaps_ms=tuple(round((b - a) * 1e3, 1) for a, b in pairwise(stamps)),
        digest=hashlib.sha256(outcome.text.encode()).hexdigest()[:16],
        error=outcome.error,
    )


def percentile(values: Iterable[float], share: float) -> float:
    """``share`` in [0, 1] of the values lie at or below it; between two of them it is interpolated. NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def meets(record: Record, objective: Objective) -> bool:
    """Whether a request completed within the objective. One of a single token has no time per token to miss."""
    if record.error or record.ttft_ms is None or record.ttft_ms > objective.ttft_ms:
        return False
    return record.tpot_ms is None or record.tpot_ms <= objective.tpot_ms


def span_s(runs: Sequence[Sequence[Record]]) -> float:
    """Seconds that runs took together: each from its first moment to its last completion or arrival."""
    return sum(max((r.at_s + (r.e2e_ms or 0.0) / 1e3 for r in run), default=0.0) for run in runs)


def summarise(runs: Sequence[Sequence[Record]], objective: Objective) -> Summary:
    """Over repetitions of the same setting at the same rate, their requests pooled."""
    records = [r for run in runs for r in run]
    completed = [r for r in records if not r.error]
    good = sum(meets(r, objective) for r in records)
    took_s = span_s(runs)
    ttft = [r.ttft_ms for r in completed if r.ttft_ms is not None]
    tpot = [r.tpot_ms for r in completed if r.tpot_ms is not None]
    e2e = [r.e2e_ms for r in completed if r.e2e_ms is not None]
    return Summary(
        requests=len(records),
        completed=len(completed),
        failed=len(records) - len(completed),
        ttft_p50=percentile(ttft, 0.5),
        ttft_p90=percentile(ttft, 0.9),
        ttft_p99=percentile(ttft, 0.99),
        tpot_p50=percentile(tpot, 0.5),
        tpot_p99=percentile(tpot, 0.99),
        gap_p99=percentile((gap for r in completed for gap in r.gaps_ms), 0.99),
        e2e_p50=percentile(e2e, 0.5),
        e2e_p99=percentile(e2e, 0.99),
        tokens_per_s=sum(r.output_tokens for r in completed) / took_s if took_s else 0.0,
        good=good,
        goodput_per_s=good / took_s if took_s else 0.0,
        late_p99=percentile((r.late_ms for r in records), 0.99),
    )


def equal_texts(runs: Sequence[Sequence[Record]], others: Sequence[Sequence[Record]]) -> tuple[int, int]:
    """Requests with the same text in both, and requests that completed in both. Runs of the same rates, in order."""
    pairs = [
        (a, b)
        for run, other in zip(runs, others, strict=True)
        for a, b in zip(run, other, strict=True)
        if not a.error and not b.error
    ]
    return sum(a.digest == b.digest for a, b in pairs), len(pairs)
