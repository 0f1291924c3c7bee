"""The answers of the Responses API that this router makes and keeps.

An answer that is being made is known by its id too. It is kept before its last event is sent, so that a client that
has seen the end can ask for it. One whose client goes away is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from cluster.access.caller import owner, unknown_id
from cluster.contract.generation import ChatMessage
from cluster.frontdoor.http_errors import HttpProblem, problem_for
from cluster.frontdoor.intake import check_model
from cluster.frontdoor.own_fields import new_id
from cluster.frontdoor.responses.parse import parse
from cluster.frontdoor.responses.requests import ResponseRequest
from cluster.frontdoor.responses.resuming import Origin, Place
from cluster.frontdoor.responses.run import Batch, Run
from cluster.frontdoor.responses.store import Kept, Store
from cluster.frontdoor.serving import Serving
from paceline.errors import InvalidRequest

BACKGROUND_WAIT_S = 1.0  # for a request in the background to be refused where its client sees it
ANSWERED = ("completed", "incomplete")  # states in which a conversation may go on

Key = tuple[str, str]  # tenant and id


class Responses:
    """Owns the store, and the tasks of answers that are made in the background. Those end at the latest with the
    router, which then refuses to go on."""

    def __init__(self, router: Serving, store: Store | None = None, resumable: bool = False) -> None:
        """resumable: streams may go on at any router."""
        self._router, self._resumable = router, resumable
        self._store = Store() if store is None else store
        self._runs: dict[Key, Run] = {}
        self._tasks: set[asyncio.Task[Exception | None]] = set()

    # -- making --------------------------------------------------------------------------------------------------

    def prepare(self, body: dict[str, Any], read: ResponseRequest, since_in: Callable[[bool], str | None]) -> Run:
        """An answer to be made. read: what ``body`` says. since_in: gives the id of the event after which a stream is
        gone on with, told whether it may be. Raises InvalidRequest, or HttpProblem for a model or an answer that is
        not there."""
        check_model(self._router, read.model)
        resumable = self._resumable and bool(read.stream)
        event_id = since_in(resumable)
        since = None if event_id is None else Place.read(event_id)
        origin = Origin.new() if since is None else since.origin
        tenant = owner(read.cache_salt or "")
        asked = parse(read, self._before(read), origin.answer_id(tenant, body) if resumable else new_id("resp"))
        generation = asked.generation if since is None else since.position.rest_of(asked.generation)
        asked = replace(asked, generation=replace(generation, keeps_told=resumable))
        return Run(self._router, asked, origin, since)

    async def make(self, run: Run) -> AsyncGenerator[Batch, None]:
        """The events of ``run``. Closing it ends the generation."""
        self._runs[_key(run)] = run
        try:
            async with aclosing(run.events()) as batches:
                async for batch in batches:
                    if run.over:
                        self._keep(run)
                    yield batch
        finally:
            if self._runs.get(_key(run)) is run:  # else its client went on with it here, before this one was over
                del self._runs[_key(run)]

    async def in_background(self, run: Run) -> dict[str, Any]:
        """Begin to make it; returns what is known after a moment. Raises what it was refused with by then."""
        task = asyncio.create_task(self._drain(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        planned = asyncio.create_task(run.planned.wait())
        try:
            await asyncio.wait({task, planned}, timeout=BACKGROUND_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            planned.cancel()
        if task.done() and (refused := task.result()) is not None:
            self._store.drop(*_key(run))
            raise refused
        return run.answer.body()

    async def _drain(self, run: Run) -> Exception | None:
        """Make it. Returns what it was refused with before its first token."""
        try:
            async with aclosing(self.make(run)) as batches:
                async for _ in batches:
                    pass
        except Exception as error:
            run.answer.fail(problem_for(error))
            self._keep(run)
            return error
        return None

    def _before(self, asked: ResponseRequest) -> tuple[ChatMessage, ...]:
        """The conversation that goes on. Raises InvalidRequest for an id that is not kept, or has no end yet."""
        tenant, previous = owner(asked.cache_salt or ""), asked.previous_response_id
        if previous is None:
            return ()
        kept = self._store.find(tenant, previous)
        if kept is None and (tenant, previous) not in self._runs:
            unknown_id("response")
            message = f"there is no response {previous!r} here"
            raise InvalidRequest("previous_response_id", message, "previous_response_not_found")
        status = "in_progress" if kept is None else kept.body["status"]
        if kept is None or status not in ANSWERED:
            raise InvalidRequest("previous_response_id", f"is {status}: there is no answer to go on from")
        return kept.turns

    def _keep(self, run: Run) -> None:
        if run.asked.stored:
            turns = (*run.asked.turns, run.answer.turn())
            self._store.keep(*_key(run), Kept(run.answer.body(), run.items, turns))

    # -- asking --------------------------------------------------------------------------------------------------

    def show(self, tenant: str, response_id: str) -> dict[str, Any]:
        """The answer as far as it is made. Raises HttpProblem when there is none."""
        return self._found(tenant, response_id).body

    def cancel(self, tenant: str, response_id: str) -> dict[str, Any]:
        """End it if it is being made; returns it. Raises HttpProblem when there is none, or when it is over."""
        run = self._runs.get((tenant, response_id))
        if run is not None and not run.over:
            run.cancel()
            return run.answer.body()
        body = self._found(tenant, response_id).body
        if body["status"] != "cancelled":
            raise HttpProblem(400, f"the response is {body['status']} and cannot be cancelled", param="response_id")
        return body

    def delete(self, tenant: str, response_id: str) -> None:
        """Keep it no more. Raises HttpProblem when there is none, or when it is being made."""
        if (tenant, response_id) in self._runs:
            raise HttpProblem(400, "the response is in progress: cancel it first", param="response_id")
        if not self._store.drop(tenant, response_id):
            raise _not_found(response_id)

    def input_items(self, tenant: str, response_id: str) -> tuple[dict[str, Any], ...]:
        """The items of its own input, oldest first. Raises HttpProblem when there is none."""
        return self._found(tenant, response_id).input

    def _found(self, tenant: str, response_id: str) -> Kept:
        run, kept = self._runs.get((tenant, response_id)), self._store.find(tenant, response_id)
        if kept is not None:
            return kept
        if run is None or not run.asked.stored:
            raise _not_found(response_id)
        return Kept(run.answer.body(), run.items, ())


def _key(run: Run) -> Key:
    return run.asked.generation.tenant, run.asked.generation.request_id


def _not_found(response_id: str) -> HttpProblem:
    """Another tenant's answer reads the same: who asks learns nothing of it."""
    unknown_id("response")
    message = f"there is no response {response_id[:256]!r} here"
    return HttpProblem(404, message, param="response_id", code="response_not_found")
