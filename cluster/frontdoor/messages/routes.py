"""The routes of the Messages API: an answer, and the tokens of a prompt."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.contract.generation import GenerationRequest
from cluster.contract.plan import Plan
from cluster.frontdoor.http_errors import dumps, problem_for
from cluster.frontdoor.http_exchange import JSON, ClientGone, Sender, read_object, while_connected
from cluster.frontdoor.intake import check_model, counted
from cluster.frontdoor.messages.answer import Answer
from cluster.frontdoor.messages.answers import AnswerMessage, MessageError, TokenCount
from cluster.frontdoor.messages.errors import PATH, message_error
from cluster.frontdoor.messages.parse import NAMES, parse_count, parse_message
from cluster.frontdoor.messages.requests import CountTokensRequest, MessageRequest
from cluster.frontdoor.own_fields import new_id
from cluster.frontdoor.resuming import Position, Told, not_the_same, position_of
from cluster.frontdoor.route_docs import generation_route
from cluster.frontdoor.serving import Serving
from cluster.frontdoor.stream_events import Event, event_text
from cluster.routing.metrics import Metrics
from cluster.routing.resume import UnknownGeneration
from paceline.errors import PacelineError, RequestCancelled
from paceline.request import FinishReason
from paceline.results import Chunk

log = logging.getLogger(__name__)

_MESSAGES = generation_route(MessageRequest, AnswerMessage, MessageError)
_COUNT_TOKENS = generation_route(CountTokensRequest, TokenCount, MessageError)


def add_messages(app: FastAPI, router: Serving, metrics: Metrics, resumable: bool = False) -> None:
    """Add the routes. resumable: streams may go on at any router."""

    @app.post(PATH, **_MESSAGES)
    async def message(request: Request) -> Response:
        """Answer a conversation in the shape of Anthropic's Messages API. With `stream` the answer is server-sent
        events."""

        async def made() -> Response:
            asked, generation = await read_object(request, lambda body: parse_message(body, new_id("msg")))
            answer = Answer(asked, generation.request_id, check_model(router, asked.model))
            can_resume = resumable and bool(asked.stream)
            since = position_of(request, can_resume)
            if since is not None:
                generation = since.rest_of(generation)
            return _Reply(router, replace(generation, keeps_told=can_resume), answer, bool(asked.stream))

        return await counted(made(), metrics)

    @app.post(f"{PATH}/count_tokens", **_COUNT_TOKENS)
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a prompt, as the model would read it."""

        async def made() -> Response:
            asked, chat = await read_object(request, parse_count)
            check_model(router, asked.model)
            try:
                found = await router.tokenize(chat)
            except PacelineError as error:
                raise NAMES.renamed(error) from error
            return Response(dumps(TokenCount(input_tokens=len(found.token_ids))), media_type=JSON)

        return await counted(made(), metrics)


class _Reply(Response):
    """Generates while it is sent, so that whatever ends the sending ends the generation."""

    def __init__(self, router: Serving, generation: GenerationRequest, answer: Answer, stream: bool) -> None:
        super().__init__()
        self._router, self._generation, self._answer, self._stream = router, generation, answer, stream
        self._prompt_tokens = 0
        self._position: Position | None = None  # where events can be gone on from

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = self._generation.request_id
        sender = Sender(send, {"x-request-id": request_id, "request-id": request_id})
        await while_connected(receive, self._reply(sender))

    async def _reply(self, sender: Sender) -> None:
        try:
            await self._send(sender)
        except ClientGone:
            log.info("%s: the client is gone", self._generation.request_id)

    async def _send(self, sender: Sender) -> None:
        try:
            async with aclosing(self._events()) as batches:
                async for events, event_id in batches:
                    if self._stream:
                        await self._tell(sender, events, event_id)
        except ClientGone:
            raise
        except UnknownGeneration as error:
            await self._fail(sender, not_the_same(error))
        except Exception as error:
            await self._fail(sender, NAMES.renamed(error))
        else:
            await (sender.write("", last=True) if self._stream else sender.whole(200, self._answer.body(), {}))

    async def _tell(self, sender: Sender, events: list[Event], event_id: str) -> None:
        if not sender.started:
            await sender.start_events()
        if events:
            await sender.write(event_text(events, event_id))

    async def _fail(self, sender: Sender, error: Exception) -> None:
        problem = problem_for(error)
        if sender.started:
            await sender.write(event_text([{**message_error(problem)}]), last=True)
        else:
            await sender.whole(problem.status, message_error(problem), problem.headers)

    async def _events(self) -> AsyncGenerator[tuple[list[Event], str], None]:
        """Events as they come, and the id of the last of each batch. Empty: the stream cannot be gone on with there. A
        client that goes on has the beginning, and what is told again only brings the answer to where it was."""
        begun = False
        async with aclosing(self._router.generate(self._generation, self._on_plan)) as chunks:
            async for chunk in chunks:
                first = [] if begun else self._answer.begin(self._prompt_tokens)
                begun = True
                more = self._answer.take(chunk)
                if not chunk.retold:
                    yield first + more, self._id_after(chunk) if more else ""
                if chunk.completion is not None:
                    if chunk.completion.finish_reason is FinishReason.ABORT:
                        raise RequestCancelled("the request was cancelled")
                    yield self._answer.complete(chunk.completion), ""

    def _id_after(self, chunk: Chunk) -> str:
        """The id of a chunk's last event. After text that comes with the end, only the end is left to tell."""
        if self._position is None:
            return ""
        told = Told(chunk.first_index + len(chunk.token_ids), chunk.completion is not None)
        return str(self._position.at([told], over=False))

    def _on_plan(self, plan: Plan) -> None:
        self._prompt_tokens = plan.num_prompt_tokens
        self._position = Position.of(plan) if self._generation.keeps_told else None
