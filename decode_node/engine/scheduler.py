"""Which sequences reserve, prefill and decode next. Pure policy: no thread, no network, no tensor.

A stream's life on this node, one owner per edge (the engine thread)::

    WAITING --pages reserved--> RESERVED --hand-off complete--> RUNNING --finish reason--> RELEASED
       |                           |  |`-its hidden rows--> DRAFTING --last row-----^         ^
       |                           |  `--local prefill--> PREFILLING --first token--^         |
       |                           |                          |                     |         |
       +--deadline, cancel---------+--hand-off terminal-------+--cancel-------------+---------+

Pages for the worst case (prompt, every token it may emit, one round of draft slots) are taken before the hand-off
begins, so a running stream never waits for memory and never has to be preempted. Hidden rows that came in place of
draft KV go to the drafter in chunks between rounds, first come, first served, so that they stall no running stream. A
stream that came without draft state runs at once; its rows are computed again in chunks, where no such work waits.
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
    """What the scheduler needs of a stream."""

    seq: Sequence | None

    @property
    def deadline(self) -> float: ...

    @property
    def paused(self) -> bool: ...


S = TypeVar("S", bound=Schedulable)


@dataclass(frozen=True)
class DecodeLimits:
    """Bounds of the scheduler."""

    max_running: int  # sequences in one round
    max_waiting: int  # streams in line for pages
    chunk_tokens: int  # rows of one local prefill step


class DecodeScheduler(Generic[S]):
    """Continuous batching, first come, first served.

    Sequences that are ready beyond ``max_running`` wait in order of arrival; they hold their pages already, which
    is what bounds their number. A paused one (its client reads too slowly) gives its seat to the next and takes it
    again when it goes on.
    """

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._line: WaitingLine[S] = WaitingLine(limits.max_waiting)
        self._prefilling: list[S] = []
        self._drafting: list[S] = []
        self._recovering: list[S] = []  # they decode meanwhile
        self._ready: list[S] = []

    @property
    def num_waiting(self) -> int:
        """Streams in line for pages."""
        return len(self._line)

    @property
    def num_running(self) -> int:
        """Sequences that decode or prefill, paused and seatless ones included."""
        return len(self._ready) + len(self._prefilling) + len(self._drafting)

    def add(self, stream: S) -> None:
        """Queue a stream for pages; raises Overloaded when the line is full."""
        self._line.add(stream)

    def reserve(self, take_pages: Callable[[S], bool]) -> list[tuple[S, Exception]]:
        """Give pages to the head of the line while there are any; returns the streams whose turn raised."""
        return self._line.admit(take_pages)

    def expire(self, now: float) -> list[S]:
        """Take out the streams that waited for pages too long."""
        return self._line.expire(now)

    def prefill(self, stream: S) -> None:
        """Compute this stream's prompt here, interleaved with decode rounds."""
        self._prefilling.append(stream)

    def draft(self, stream: S) -> None:
        """Prefill the drafter from this stream's hidden rows, interleaved with decode rounds."""
        self._drafting.append(stream)

    def recover(self, stream: S) -> None:
        """Compute this running stream's hidden rows again for the drafter, where steps have room."""
        self._recovering.append(stream)

    def next_recovery(self) -> tuple[S, int] | None:
        """The stream whose rows are computed again next, and how many at most."""
        return (self._recovering[0], self._limits.chunk_tokens) if self._recovering else None

    def end_recovery(self, stream: S) -> None:
        """The drafter has all of this stream's rows, or is not to get them."""
        self._recovering.remove(stream)

    def run(self, stream: S) -> None:
        """Decode this stream from the next round on."""
        for members in (self._prefilling, self._drafting):
            if stream in members:
                members.remove(stream)
        self._ready.append(stream)

    def next_draft(self) -> tuple[S, int] | None:
        """The stream whose hidden rows the drafter gets next, and how many at most."""
        return (self._drafting[0], self._limits.chunk_tokens) if self._drafting else None

    def next_chunks(self) -> list[tuple[S, PrefillChunk]]:
        """The next local prefill step."""
        by_seq = {id(stream.seq): stream for stream in self._prefilling if stream.seq is not None}
        seqs = [stream.seq for stream in self._prefilling if stream.seq is not None]
        return [(by_seq[id(chunk.seq)], chunk) for chunk in plan_chunks(seqs, self._limits.chunk_tokens)]

    def next_batch(self) -> list[S]:
        """The sequences of the next round."""
        return [stream for stream in self._ready if not stream.paused][: self._limits.max_running]

    def discard(self, stream: S) -> None:
        """Forget a stream, wherever it stands."""
        if self._line.discard(stream):
            return
        for members in (self._prefilling, self._drafting, self._recovering, self._ready):
            if stream in members:
                members.remove(stream)
