"""Which prompts run in the next prefill step. Pure policy: no thread, no network, no tensor.

A job's life, one owner per edge::

    WAITING --pages for the whole prompt--> COMPUTING --first token sampled--> HANDING_OVER --acknowledged--> RELEASED
       |                                       |                                    |                             ^
       +--deadline, cancel---------------------+--cancel, failed step, lost link----+--once the hand-off is terminal

The engine thread owns every edge; the hand-off is terminal when the decode node acknowledged or the link is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from paceline.engine.model_runner import PrefillChunk
from paceline.serving.chunking import plan_chunks
from paceline.serving.waiting import WaitingLine
from paceline.spec_decode.sequence import Sequence


class Schedulable(Protocol):
    """What the scheduler needs of a job."""

    seq: Sequence | None

    @property
    def deadline(self) -> float: ...


J = TypeVar("J", bound=Schedulable)


@dataclass(frozen=True)
class PrefillLimits:
    """Bounds of the scheduler."""

    chunk_tokens: int  # rows of one step, over all sequences
    max_running: int  # prompts in computation at once
    max_waiting: int  # prompts in line for pages


class PrefillScheduler(Generic[J]):
    """First come, first served. A prompt starts when pages for all of it are there, so that no prompt stalls
    half-way holding memory that another one needs."""

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._line: WaitingLine[J] = WaitingLine(limits.max_waiting)
        self._computing: list[J] = []

    @property
    def num_waiting(self) -> int:
        """Jobs in line."""
        return len(self._line)

    @property
    def num_computing(self) -> int:
        """Jobs with chunks left."""
        return len(self._computing)

    def add(self, job: J) -> None:
        """Queue a job; raises Overloaded when the line is full."""
        self._line.add(job)

    def admit(self, start: Callable[[J], bool]) -> list[tuple[J, Exception]]:
        """Start jobs from the head of the line while there is room. ``start`` fills ``job.seq`` and takes its pages,
        or says False when the pool has none. Returns the jobs whose start raised."""

        def start_one(job: J) -> bool:
            if len(self._computing) >= self._limits.max_running or not start(job):
                return False
            self._computing.append(job)
            return True

        return self._line.admit(start_one)

    def expire(self, now: float) -> list[J]:
        """Take out the jobs that waited for too long."""
        return self._line.expire(now)

    def next_chunks(self) -> list[tuple[J, PrefillChunk]]:
        """The next step: one token budget, shared in order of arrival."""
        by_seq = {id(job.seq): job for job in self._computing if job.seq is not None}
        seqs = [job.seq for job in self._computing if job.seq is not None]
        return [(by_seq[id(chunk.seq)], chunk) for chunk in plan_chunks(seqs, self._limits.chunk_tokens)]

    def discard(self, job: J) -> None:
        """Forget a job, wherever it stands."""
        if not self._line.discard(job) and job in self._computing:
            self._computing.remove(job)
