"""The routes of the Responses API: create, retrieve, cancel, delete, and the input's items."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.access.caller import owner
from cluster.frontdoor.http_errors import dumps, problem_for
from cluster.frontdoor.http_exchange import JSON, ClientGone, Sender, read_object, while_connected
from cluster.frontdoor.intake import counted
from cluster.frontdoor.openai_answers import Error
from cluster.frontdoor.responses.answers import DeletedResponse, InputItems
from cluster.frontdoor.responses.answers import Response as ResponseShape
from cluster.frontdoor.responses.parse import read_body
from cluster.frontdoor.responses.requests import ResponseRequest
from cluster.frontdoor.responses.run import Run
from cluster.frontdoor.responses.service import Responses
from cluster.frontdoor.resuming import last_event_id, not_the_same
from cluster.frontdoor.route_docs import OTHER_ERRORS, Route, generation_route
from cluster.frontdoor.serving import Serving
from cluster.frontdoor.stream_events import event_text
from cluster.routing.metrics import Metrics
from cluster.routing.resume import UnknownGeneration
from paceline.errors import InvalidRequest

log = logging.getLogger(__name__)

PATH = "/v1/responses"
DEFAULT_ITEMS, MAX_ITEMS = 20, 100  # of one page of input items


def _of_response(answer: type[Any], text: str) -> Route:
    """A route that asks about an answer by its id."""
    none = {"description": "No answer of this id and tenant is here.", "model": Error}
    wrong = {"description": "The query is wrong, or the answer's state does not allow it.", "model": Error}
    return {"responses": {200: {"description": text, "model": answer}, 400: wrong, 404: none, **OTHER_ERRORS}}


_RESPONSES = generation_route(ResponseRequest, ResponseShape)
_RESPONSE = _of_response(ResponseShape, "The answer as far as it is made.")
_DELETED_RESPONSE = _of_response(DeletedResponse, "It is kept no more.")
_INPUT_ITEMS = _of_response(InputItems, "The items.")


def add_responses(app: FastAPI, router: Serving, metrics: Metrics, resumable: bool = False) -> None:
    """Add the routes. resumable: streams may go on at any router."""
    responses = Responses(router, resumable=resumable)

    @app.post(PATH, **_RESPONSES)
    async def create_response(request: Request) -> Response:
        """Answer a text or a conversation. With `stream` the answer is server-sent events, with `background` it is
        made while nobody waits."""

        async def made() -> Response:
            body, asked = await read_object(request, lambda body: (body, read_body(body)))
            run = responses.prepare(body, asked, partial(last_event_id, request))
            if run.asked.body.background:
                return _json(await responses.in_background(run), _headers(run))
            return _Reply(responses, run)

        return await counted(made(), metrics)

    @app.get(f"{PATH}/{{response_id}}", **_RESPONSE)
    async def response(request: Request, response_id: str) -> Response:
        """Tell an answer that is being made, or that is kept. `cache_salt` in the query names its tenant."""
        tenant = owner(_query(request)["cache_salt"])
        return _json(responses.show(tenant, response_id))

    @app.post(f"{PATH}/{{response_id}}/cancel", **_RESPONSE)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """End an answer that is being made; its nodes are freed. `cache_salt` in the query names its tenant."""
        return _json(responses.cancel(owner(_query(request)["cache_salt"]), response_id))

    @app.delete(f"{PATH}/{{response_id}}", **_DELETED_RESPONSE)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Keep an answer no more. `cache_salt` in the query names its tenant."""
        responses.delete(owner(_query(request)["cache_salt"]), response_id)
        return _json(DeletedResponse(id=response_id, object="response", deleted=True))

    @app.get(f"{PATH}/{{response_id}}/input_items", **_INPUT_ITEMS)
    async def input_items(request: Request, response_id: str) -> Response:
        """List the items of an answer's own input. The query may have `order` (desc, the default, or asc), `limit`
        (at most 100, 20 by default), `after` (an item's id) and `cache_salt`, which names the tenant."""
        query = _query(request, "order", "limit", "after")
        items = list(responses.input_items(owner(query["cache_salt"]), response_id))
        return _json(_page(items, query["order"], query["limit"], query["after"]))


def _query(request: Request, *more: str) -> dict[str, str]:
    """The query; what is not there is empty. Raises InvalidRequest naming what is not known here."""
    known = ("cache_salt", *more)
    for name in request.query_params:
        if name not in known:
            raise InvalidRequest(name[:100], "is not supported in the query")
    return {name: request.query_params.get(name, "") for name in known}


def _page(items: list[dict[str, Any]], order: str, limit: str, after: str) -> InputItems:
    """The items that are asked for. Raises InvalidRequest."""
    if order not in ("", "asc", "desc"):
        raise InvalidRequest("order", "must be 'asc' or 'desc'")
    if limit and not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
        raise InvalidRequest("limit", f"must be between 1 and {MAX_ITEMS}")
    if order != "asc":
        items = items[::-1]
    ids = [str(item["id"]) for item in items]
    if after:
        if after not in ids:
            raise InvalidRequest("after", "is the id of no item")
        first = ids.index(after) + 1
        items, ids = items[first:], ids[first:]
    page = items[: int(limit or DEFAULT_ITEMS)]
    ends = (ids[0], ids[len(page) - 1]) if page else (None, None)
    return InputItems(object="list", data=page, first_id=ends[0], last_id=ends[1], has_more=len(page) < len(items))


def _json(body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(body), headers=headers, media_type=JSON)


def _headers(run: Run) -> dict[str, str]:
    return {"x-request-id": run.asked.generation.request_id}


class _Reply(Response):
    """Generates while it is sent, so that whatever ends the sending ends the generation."""

    def __init__(self, responses: Responses, run: Run) -> None:
        super().__init__()
        self._responses, self._run = responses, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._reply(Sender(send, _headers(self._run))))

    async def _reply(self, sender: Sender) -> None:
        try:
            await self._send(sender)
        except ClientGone:
            log.info("%s: the client is gone", self._run.asked.generation.request_id)

    async def _send(self, sender: Sender) -> None:
        stream = bool(self._run.asked.body.stream)
        try:
            async with aclosing(self._responses.make(self._run)) as batches:
                async for events, event_id in batches:
                    if stream and not sender.started:
                        await sender.start_events()
                    if stream and events:
                        await sender.write(event_text(events, event_id))
        except ClientGone:
            raise
        except Exception as error:  # of a stream before its first event: later ones are events themselves
            problem = problem_for(not_the_same(error) if isinstance(error, UnknownGeneration) else error)
            await sender.whole(problem.status, problem.body(), problem.headers)
        else:
            await (sender.write("", last=True) if stream else sender.whole(200, self._run.answer.body(), {}))
