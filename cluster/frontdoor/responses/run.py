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
from cluster.frontdoor.serving import Serving
from cluster.frontdoor.stream_events import Event
from paceline.request import FinishReason
from paceline.results import Chunk, Completion


class _Cancelled(Exception):
    """The answer was asked to end."""


class Run:
    """Life: made -> ``events`` read to their end, or left. ``planned`` is set when the request may run."""

    def __init__(self, router: Serving, asked: Asked) -> None:
        self.asked = asked
        self.items = listed(asked.body.input)  # the input, as it is told
        self.answer = Answer(asked, router.model_info().model)
        self.planned = asyncio.Event()
        self._router = router
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

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """Events as they come. An error is raised, with the body's own names of fields; of a stream that has begun it
        is the last event."""
        begun = False
        try:
            async with aclosing(self._router.generate(self.asked.generation, self._on_plan)) as chunks:
                last: Completion | None = None
                while last is None:
                    chunk = await self._next(chunks)
                    yield (self.answer.take(chunk) if begun else self.answer.begin() + self.answer.take(chunk))
                    begun, last = True, chunk.completion
            if self._cancelled or last.finish_reason is FinishReason.ABORT:
                raise _Cancelled
            yield self.answer.complete(last)
        except _Cancelled:
            yield ([] if begun else self.answer.begin()) + self.answer.cancel()
        except Exception as error:
            if not (begun and self.asked.body.stream):
                raise NAMES.renamed(error) from error
            yield self.answer.fail(problem_for(error))

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
        self.planned.set()
