"""Policy of the prefill node, without a node."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.sequence import Sequence
from prefill_node.engine.scheduler import PrefillLimits, PrefillScheduler


@dataclass(eq=False)
class FakeJob:
    length: int
    seq: Sequence | None = None
    deadline: float = 10.0


def start(job: FakeJob) -> bool:
    request = SequenceRequest("r", tuple(range(job.length)), SamplingParams(seed=0))
    job.seq = Sequence.start(request, PageTable(PageAllocator(1), 4))
    return True


def scheduler_of(*lengths: int, max_running: int = 4) -> tuple[PrefillScheduler[FakeJob], list[FakeJob]]:
    scheduler: PrefillScheduler[FakeJob] = PrefillScheduler(PrefillLimits(8, max_running, 4))
    jobs = [FakeJob(length) for length in lengths]
    for job in jobs:
        scheduler.add(job)
    return scheduler, jobs


def test_one_budget_for_all_in_order_of_arrival() -> None:
    scheduler, (a, b, c) = scheduler_of(3, 20, 5)
    assert scheduler.admit(start) == []
    assert [(job, chunk.start, chunk.end) for job, chunk in scheduler.next_chunks()] == [(a, 0, 3), (b, 0, 5)]
    scheduler.discard(a)
    assert b.seq is not None
    b.seq.num_computed = 17
    assert [(job, chunk.start, chunk.end) for job, chunk in scheduler.next_chunks()] == [(b, 17, 20), (c, 0, 5)]


def test_only_so_many_prompts_hold_pages_at_once() -> None:
    scheduler, (a, b, c) = scheduler_of(3, 3, 3, max_running=2)
    scheduler.admit(start)
    assert (scheduler.num_computing, scheduler.num_waiting) == (2, 1)
    scheduler.discard(a)
    scheduler.admit(start)
    assert (scheduler.num_computing, scheduler.num_waiting) == (2, 0)
    assert c.seq is not None
    assert [job for job, _ in scheduler.next_chunks()] == [b, c]


def test_a_full_line_refuses_and_a_late_job_leaves_it() -> None:
    scheduler, jobs = scheduler_of(3, 3, 3, 3)
    with pytest.raises(Overloaded):
        scheduler.add(FakeJob(3))
    jobs[2].deadline = 1.0
    assert scheduler.expire(1.0) == [jobs[2]]
    scheduler.discard(jobs[0])
    assert scheduler.num_waiting == 2
