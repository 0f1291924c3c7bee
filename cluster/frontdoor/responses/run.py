"""One answer while it is made: chunks in, events out, and the word that ends it early.

Whoever reads ``events`` drives it. ``cancel`` may come from another task at any time; the generation then ends, and
the nodes with it, as soon as the reader asks for more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from cluster.contract.plan import Plan
from cluster.frontdoor.http_errors import problem_for
from cluster.frontdoor.responses.answer import Answer
from cluster.frontdoor.responses.items import listed
from cluster.frontdoor.responses.parse import NAMES, Asked
from cluster.frontdoor.responses.resuming import Origin, Place
from cluster.frontdoor.resuming import Position, Told
from cluster.frontdoor.serving import Serving
from cluster.frontdoor.stream_events import Event
from cluster.routing.resume import UnknownGeneration
from paceline.request import FinishReason
from paceline.results import Chunk, Completion

Batch = tuple[list[Event], str]  # and the id of the last one, or nothing


class _Cancelled(Exception):
    """The answer was asked to end."""


class Run:
    """Life: made -> ``events`` read to their end, or left. ``planned`` is set when the request may run."""

    def __init__(self, router: Serving, asked: Asked, origin: Origin, since: Place | None = None) -> None:
        """since: what the client has of a stream that another router began, which ``asked`` goes on with."""
        self.asked = asked
        self.items = listed(asked.body.input)  # the input, as it is told
        self.answer = Answer(asked, router.model_info().model, origin.created_at)
        self.planned = asyncio.Event()
        self._router, self._origin, self._since = router, origin, since
        self._position: Position | None = None  # where the stream can be gone on from
        self._cancelled = False
        self._waiting: asyncio.Timeout | None = None

    @property
    def over(self) -> bool:
        """Whether nothing follows, or only the events that say so."""
        return self.answer.status not in ("queued", "in_progress")

    def cancel(self) -> None:
        """End it. The nodes are freed before anything more is read of it."""
        if self.over:
            return
        self._cancelled, self.answer.status = True, "cancelled"
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def events(self) -> AsyncGenerator[Batch, None]:
        """Events as they come, and the id of the last one of each batch. An error is raised, with the body's own names
        of fields; of a stream that has begun it is the last event. What a client that goes on has is not told again."""
        first, told = self._begin, False
        try:
            async with aclosing(self._router.generate(self.asked.generation, self._on_plan)) as chunks:
                last: Completion | None = None
                while last is None:
                    chunk = await self._next(chunks)
                    events = first() + self.answer.take(chunk)
                    first, last = list[Event], chunk.completion
                    if chunk.retold:
                        self._go_on()
                    else:
                        told = True
                        yield events, self._id_after(chunk, events)
            if self._cancelled or last.finish_reason is FinishReason.ABORT:
                raise _Cancelled
            yield self.answer.complete(last), ""
        except _Cancelled:
            yield first() + self.answer.cancel(), ""
        except Exception as error:
            if not (told and self.asked.body.stream):
                raise NAMES.renamed(error) from error
            yield self.answer.fail(problem_for(error)), ""

    def _begin(self) -> list[Event]:
        events = self.answer.begin()
        if self._since is None:
            return events
        self._go_on()
        return []

    def _go_on(self) -> None:
        """The client has all events up to here. Raises UnknownGeneration where it may have others."""
        assert self._since is not None  # nothing is told again else
        self.answer.number_from(self._since.number + 1)
        if not self.answer.in_order:
            raise UnknownGeneration("text came after a call there, and clients may have it as one item or as two")

    def _id_after(self, chunk: Chunk, events: list[Event]) -> str:
        """The id of a chunk's last event; empty where the stream cannot be gone on from there."""
        if self._position is None or not events or not self.answer.in_order:
            return ""
        told = Told(chunk.first_index + len(chunk.token_ids), chunk.completion is not None)
        return str(Place(self._position.at([told], over=False), self._origin, events[-1]["sequence_number"]))

    async def _next(self, chunks: AsyncGenerator[Chunk, None]) -> Chunk:
        """The next chunk, unless it is cancelled first."""
        if self._cancelled:
            raise _Cancelled
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await anext(chunks)
        except TimeoutError:
            if self._waiting is not None and self._waiting.expired():
                raise _Cancelled from None
            raise
        finally:
            self._waiting = None

    def _on_plan(self, plan: Plan) -> None:
        self._position = Position.of(plan) if self.asked.generation.keeps_told else None
        self.planned.set()
