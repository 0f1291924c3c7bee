"""Batch sweep: where speculation stops paying, and whether an adaptive draft length knows it (algorithms.md I, K6).

At each batch size every drafter runs the same requests with runners of its own and empty memories. The drafters
advance in small slices, always the one that is behind in tokens, so that they see the same machine at the same time.
Rounds count while every place is taken: plain requests of one length end together, drafted ones one by one, and what
is left of them then runs at smaller batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.common.decode_loop import DecodeLoop, TimedRunner
from benchmarks.speculation.bench import Progress, Settings, warm_up
from benchmarks.speculation.drafter_specs import BASELINE, DraftRun
from benchmarks.speculation.stats import first_difference, ratio
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.request import SequenceRequest
from paceline.speculation import AUTO, DEFAULT

MIN_REQUESTS = 12  # of a point; a multiple of Spec-Bench's six groups
REQUESTS_PER_PLACE = 2  # requests of a point per place in the batch: places that fall free are filled again
SLICE_ROUNDS = 8
ADAPTIVE_FLOOR = 0.97  # of the better of fixed and none

Factory = Callable[[DraftRun, int], ModelRunner]  # (run, batch)


@dataclass(frozen=True)
class Point:
    """One drafter at one batch size, while every place is taken."""

    drafter: str
    batch: int
    requests: int
    tokens: int
    rounds: int  # batched rounds
    decode_s: float
    draft_s: float
    tokens_per_s: float
    acceptance_length: float
    speedup: float  # over none at this batch size
    unequal: int  # requests whose tokens are not none's
    to_best: float | None  # adaptive runs only: tokens/s over the best of none and the fixed runs it is held to


@dataclass(frozen=True)
class SweepReport:
    """The results. Written as JSON and read back."""

    settings: Settings
    kernels: str
    bit_exact: bool
    dropped: dict[str, int]
    prompts_repeat: bool  # a point needed more requests than there are prompts: drafters with a memory gain by it
    points: tuple[Point, ...]
    crossovers: dict[str, float | None]  # batch from which a fixed run is slower than none; None: nowhere measured

    def to_json(self) -> str:
        """See SweepReport."""
        return TypeAdapter(SweepReport).dump_json(self).decode()

    @classmethod
    def read(cls, path: Path) -> SweepReport:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None

    @property
    def holds(self) -> bool:
        """Whether every adaptive run stays at or above ADAPTIVE_FLOOR of the best."""
        return all(p.to_best >= ADAPTIVE_FLOOR for p in self.points if p.to_best is not None)


def num_requests(batch: int) -> int:
    """Requests of a point."""
    return max(MIN_REQUESTS, REQUESTS_PER_PLACE * batch)


def sweep(
    runs: Sequence[DraftRun],
    batches: Sequence[int],
    requests: Sequence[SequenceRequest],
    build: Factory,
    settings: Settings,
    dropped: dict[str, int] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> SweepReport:
    """Measure every point. requests: a balanced list, used from its beginning and again when it ends."""
    if not requests:
        raise ConfigError("prompts", "every prompt is longer than --max-prompt-tokens")
    if BASELINE not in (each.label for each in runs):
        raise ConfigError("drafters", f"{BASELINE} must be among them: the others are compared with it")
    points: list[Point] = []
    kernels, bit_exact = "", False
    for done, batch in enumerate(sorted(set(batches))):
        progress(done, len(set(batches)), f"batch {batch}")
        timed = [TimedRunner(each.label, build(each, batch)) for each in runs]
        kernels, bit_exact = timed[0].runner.identity.kernels, timed[0].runner.bit_exact
        for each in timed:
            warm_up(each, requests[0].params)
        points += measure(
            runs, batch, [DecodeLoop(each, filled(requests, batch), batch, only_full=True) for each in timed]
        )
    progress(len(set(batches)), len(set(batches)), "done")
    return SweepReport(
        settings=settings,
        kernels=kernels,
        bit_exact=bit_exact,
        dropped=dropped or {},
        prompts_repeat=num_requests(max(batches)) > len(requests),
        points=tuple(points),
        crossovers={
            each.label: _crossover(points, each) for each in runs if each.label != BASELINE and not each.adaptive
        },
    )


def filled(requests: Sequence[SequenceRequest], batch: int) -> list[SequenceRequest]:
    """The requests of a point, repeated to fill it."""
    times = math.ceil(num_requests(batch) / len(requests))
    return list(islice([*requests] * times, num_requests(batch)))


def measure(runs: Sequence[DraftRun], batch: int, loops: Sequence[DecodeLoop]) -> list[Point]:
    """Run the loops side by side to their ends. loops: one per run."""
    while behind := [loop for loop in loops if not loop.finished]:
        loop = min(behind, key=lambda each: each.decode_tokens)
        for _ in range(SLICE_ROUNDS):
            loop.advance()
    rates = {run.label: ratio(loop.decode_tokens, loop.decode_s) for run, loop in zip(runs, loops, strict=True)}
    plain = next(loop for run, loop in zip(runs, loops, strict=True) if run.label == BASELINE)
    return [_point(run, batch, loop, plain, rates, runs) for run, loop in zip(runs, loops, strict=True)]


def _point(
    run: DraftRun, batch: int, loop: DecodeLoop, plain: DecodeLoop, rates: dict[str, float], runs: Sequence[DraftRun]
) -> Point:
    rate = rates[run.label]
    best = max(rates[label] for label in held_to(run, runs))
    unequal = sum(
        first_difference(loop.answers[i].token_ids, answer.token_ids) is not None for i, answer in plain.answers.items()
    )
    return Point(
        drafter=run.label,
        batch=batch,
        requests=len(loop.answers),
        tokens=loop.decode_tokens,
        rounds=loop.rounds,
        decode_s=loop.decode_s,
        draft_s=loop.draft_s,
        tokens_per_s=rate,
        acceptance_length=ratio(loop.decode_tokens, loop.sequence_rounds),
        speedup=ratio(rate, rates[BASELINE]),
        unequal=unequal,
        to_best=ratio(rate, best) if run.adaptive else None,
    )


def held_to(run: DraftRun, runs: Sequence[DraftRun]) -> list[str]:
    """Labels of none and of the fixed runs of the same drafter; ``auto`` and ``default`` choose among all, so they are
    held to all."""
    chooses = run.drafter in (AUTO, DEFAULT)
    return [BASELINE, *(r.label for r in runs if not r.adaptive and (chooses or r.drafter == run.drafter))]


def _crossover(points: Sequence[Point], run: DraftRun) -> float | None:
    return crossover([(p.batch, p.speedup) for p in points if p.drafter == run.label])


def crossover(curve: Sequence[tuple[int, float]]) -> float | None:
    """Batch size at which a curve of (batch, speed-up), batches rising, falls below 1 for good.

    Between two points it is interpolated over the logarithm of the batch size; None when the last point is at or
    above 1; the first batch size when no point is.
    """
    above = [i for i, (_, gain) in enumerate(curve) if gain >= 1.0]
    if not curve or (above and above[-1] == len(curve) - 1):
        return None
    if not above:
        return float(curve[0][0])
    (left, high), (right, low) = curve[above[-1]], curve[above[-1] + 1]
    share = (high - 1.0) / (high - low)
    return float(left * (right / left) ** share)
