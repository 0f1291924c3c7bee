"""One sequence on a decode node, from its RPC to the return of its pages."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from kv_transfer.handoff.state import Handoff
from kv_transfer.transports.side_stream import read_by_the_model
from paceline.errors import PacelineError
from paceline.grammar.compile import CompiledGrammar
from paceline.kvcache.allocator import PageRef
from paceline.request import SequenceRequest
from paceline.serving.loop import notify
from paceline.spec_decode.sequence import Sequence as Running
from paceline.tracing import NO_TRACE, Trace
from paceline.v1 import node_pb2

MAX_PENDING_EVENTS = 64  # rounds that a client may lag behind before its sequence pauses
MAX_TELL_EVERY_S = 1.0

Event = node_pb2.DecodeEvent | PacelineError


class StreamPhase(enum.Enum):
    """Where a stream stands; the edges are in engine/scheduler.py."""

    WAITING = "waiting"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    DRAFTING = "drafting"
    RUNNING = "running"
    RELEASED = "released"


class _Held(threading.local):
    """Queues to which this thread has pushed, and whose readers it has not woken yet; None: it wakes them at once."""

    queues: list[EventQueue] | None = None


_held = _Held()


@contextmanager
def told_together() -> Iterator[None]:
    """Events that this thread pushes meanwhile wake each event loop once, at the end: a loop that is woken for the
    first stream of a round takes the interpreter from the engine that tells the others."""
    _held.queues = []
    try:
        yield
    finally:
        queues, _held.queues = _held.queues, None
        for loop in {queue.loop for queue in queues}:
            notify(loop, _wake_all, [queue for queue in queues if queue.loop is loop])


def _wake_all(queues: list[EventQueue]) -> None:
    for queue in queues:
        queue.wake_reader()


class EventQueue:
    """Events of one stream: produced by the engine thread, consumed by the RPC on the event loop.

    Never grows past ``MAX_PENDING_EVENTS``, the messages of a prompt's log-probabilities and an end, since the engine
    pauses a sequence whose queue is full.
    Each counter has one writer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None], tell_every_s: float = 0.0) -> None:
        """wake: tells the engine that there is room again. tell_every_s: tokens are taken at most so often, those that
        wait together; 0: each event by itself."""
        self.loop = loop
        self._wake = wake
        self._tell_every_s = min(tell_every_s, MAX_TELL_EVERY_S) if tell_every_s > 0 else 0.0  # NaN is 0
        self._events: deque[Event] = deque()  # the engine appends, the RPC takes
        self._there = asyncio.Event()  # there may be something to take
        self._gathers = False  # by the RPC: tokens need not wake it
        self._pushed = 0  # by the engine
        self._taken = 0  # by the RPC

    @property
    def full(self) -> bool:
        """The reader lags behind."""
        return self._pushed - self._taken >= MAX_PENDING_EVENTS

    def push(self, event: Event) -> None:
        """Append an event; an error is the last one. Engine thread."""
        self._pushed += 1
        self._events.append(event)
        if self._gathers and _has_tokens(event) and not self.full:  # looked at after the event was appended: see take
            return
        if _held.queues is None:
            notify(self.loop, self.wake_reader)
        else:
            _held.queues.append(self)

    def wake_reader(self) -> None:
        """There is something to take. Event loop."""
        self._there.set()

    async def take(self) -> node_pb2.DecodeEvent:
        """The next event, or the next ones in one; raises the error that ended the stream."""
        while not self._events:  # looked at after ``_gathers`` was taken back, so that no event is missed
            self._there.clear()
            await self._there.wait()
        taken = [self._events.popleft()]
        while self._tell_every_s and _made_by_round(taken[-1]) and self._events and _made_by_round(self._events[0]):
            taken.append(self._events.popleft())
        self._taken += len(taken)
        if self._pushed - self._taken + len(taken) >= MAX_PENDING_EVENTS:  # the engine may have seen it full
            self._wake()
        if isinstance(taken[0], PacelineError):
            raise taken[0]
        return taken[0] if len(taken) == 1 else _joined([event.tokens for event in taken])  # type: ignore[union-attr]

    async def gather(self) -> None:
        """After tokens were told: let others come for a while, unless something comes that is to be told at once."""
        self._there.clear()
        self._gathers = True
        try:
            if not self.full and (not self._events or _has_tokens(self._events[-1])):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._tell_every_s):
                        await self._there.wait()
        finally:
            self._gathers = False


def _has_tokens(event: Event) -> bool:
    return isinstance(event, node_pb2.DecodeEvent) and event.HasField("tokens")


def _made_by_round(event: Event) -> bool:
    return isinstance(event, node_pb2.DecodeEvent) and event.HasField("tokens") and event.tokens.HasField("round")


def _joined(parts: Sequence[node_pb2.Tokens]) -> node_pb2.DecodeEvent:
    """The tokens of rounds that followed one another."""
    told = node_pb2.Tokens(first_index=parts[0].first_index, cached_tokens=parts[0].cached_tokens)
    for part in parts:
        told.token_ids.extend(part.token_ids)
        told.logprobs.extend(part.logprobs)
        told.rounds.append(part.round)
    return node_pb2.DecodeEvent(tokens=told)


class HiddenRows:
    """Hidden rows of a hand-off as they arrive, until the drafter has computed its own rows from them.

    Written by one receiver thread; read by the engine once the hand-off is ready.
    """

    def __init__(self, first_token: int, num_tokens: int) -> None:
        self._first, self._count = first_token, num_tokens
        self._rows: torch.Tensor | None = None  # [num_tokens, row_width]; made when the first rows come

    def write(self, first_token: int, rows: torch.Tensor) -> None:
        """Keep ``rows`` [n, row_width] of tokens first_token... on."""
        if self._rows is None:
            kept = torch.empty(self._count, rows.shape[1], dtype=rows.dtype, device=rows.device)
            self._rows = read_by_the_model(kept)
        start = first_token - self._first
        self._rows[start : start + rows.shape[0]] = rows

    def read(self, start: int, end: int) -> torch.Tensor:
        """Rows of tokens start..end-1, [end - start, row_width]; of width 0 where none came."""
        if self._rows is None:
            return torch.empty(end - start, 0)
        return self._rows[start - self._first : end - self._first]

    def drop(self) -> None:
        """Free the rows, which nobody needs any more."""
        self._rows = None


@dataclass(frozen=True)
class Landing:
    """Where the rows of a hand-off go. Fixed at the reservation, so that the receiver's thread needs no table."""

    handoff: Handoff
    pages: tuple[PageRef, ...]  # of the sequence, by position
    slots: torch.Tensor  # int32 [num_prefill], CPU
    hidden: HiddenRows
    free: torch.cuda.Event | None = None  # on a GPU: after it nothing that was queued before uses the pages


@dataclass(eq=False)
class Stream:
    """Made by the RPC; from then on the engine thread alone changes it, but for ``num_told``."""

    request: SequenceRequest
    local_prefill: bool  # as asked, or found at the reservation: see local_prefill_up_to
    ticket: str  # unique; names the stream even when no hand-off is to come
    deadline: float  # to get pages, monotonic clock
    events: EventQueue
    grammar: CompiledGrammar | None = None  # of the request, if it has one
    local_prefill_up_to: int = 0  # prompt tokens to compute, cached ones apart, that are not worth a hand-off
    trace: Trace = NO_TRACE  # the engine thread's row; the receiver records on a row of its own
    num_told: int = 0  # the RPC: output tokens that the router was told, those of prefill and resumed ones included
    queued_at: float = field(default_factory=time.monotonic)
    phase: StreamPhase = StreamPhase.WAITING
    seq: Running | None = None  # the engine, when the stream reaches the head of the line
    landing: Landing | None = None  # the engine, with the pages, unless local_prefill
    draft_prefilled: int = 0  # the engine, while DRAFTING or recovering: tokens whose rows the drafter has
    left: bool = False  # the engine: the RPC is gone, pages wait for the end of the hand-off
    overdue: bool = False  # the engine: a deadline was applied to the hand-off

    @property
    def paused(self) -> bool:
        """Its client reads too slowly: leave it out of the batch, drop nothing."""
        return self.events.full
