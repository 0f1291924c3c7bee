"""Policy of the decode node, without a node."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from decode_node.engine.scheduler import DecodeLimits, DecodeScheduler
from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.sequence import Sequence


@dataclass(eq=False)
class FakeStream:
    name: str
    seq: Sequence | None = None
    deadline: float = 10.0
    paused: bool = False


def scheduler_of(*names: str, max_running: int = 2) -> tuple[DecodeScheduler[FakeStream], list[FakeStream]]:
    """A scheduler with these streams running."""
    scheduler: DecodeScheduler[FakeStream] = DecodeScheduler(DecodeLimits(max_running, 2, 8))
    streams = [FakeStream(name) for name in names]
    for stream in streams:
        scheduler.run(stream)
    return scheduler, streams


def prompt(length: int) -> Sequence:
    request = SequenceRequest("r", tuple(range(length)), SamplingParams(seed=0))
    return Sequence.start(request, PageTable(PageAllocator(1), 4))


def test_seats_go_in_order_of_arrival() -> None:
    scheduler, (a, b, c) = scheduler_of("a", "b", "c")
    assert scheduler.next_batch() == [a, b]
    scheduler.discard(a)
    assert scheduler.next_batch() == [b, c]
    assert scheduler.num_running == 2


def test_a_paused_stream_lends_its_seat() -> None:
    scheduler, (a, b, c) = scheduler_of("a", "b", "c")
    a.paused = True
    assert scheduler.next_batch() == [b, c]
    a.paused = False
    assert scheduler.next_batch() == [a, b]


def test_the_line_is_bounded_and_keeps_its_order() -> None:
    scheduler, _ = scheduler_of()
    a, b, c = FakeStream("a"), FakeStream("b", deadline=1.0), FakeStream("c")
    scheduler.add(a)
    scheduler.add(b)
    with pytest.raises(Overloaded):
        scheduler.add(c)
    assert scheduler.reserve(lambda stream: False) == []
    assert scheduler.num_waiting == 2
    assert scheduler.expire(1.0) == [b]
    assert scheduler.reserve(lambda stream: stream is a) == []
    assert scheduler.num_waiting == 0


def test_local_prefill_becomes_decoding() -> None:
    scheduler, (running,) = scheduler_of("running")
    local = FakeStream("local", seq=prompt(11))
    scheduler.prefill(local)
    assert [(s.name, c.start, c.end) for s, c in scheduler.next_chunks()] == [("local", 0, 8)]
    assert scheduler.next_batch() == [running]
    scheduler.run(local)
    assert scheduler.next_chunks() == []
    assert scheduler.next_batch() == [running, local]
    scheduler.discard(local)
    assert scheduler.num_running == 1
