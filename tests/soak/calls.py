"""One request over gRPC or HTTP, streaming or not, heard until its end or until its client has enough."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import httpx

from paceline.client import AsyncClient, Generation
from tests.soak.answers import Heard
from tests.soak.asks import Ask, Turn

Enough = Callable[[Heard], bool]


class Calls:
    """Both surfaces of one deployment."""

    def __init__(self, grpc: AsyncClient, http: httpx.AsyncClient) -> None:
        """http: its base address is the deployment's."""
        self._grpc, self._http = grpc, http

    async def make(self, turn: Turn, ask: Ask, heard: Heard, enough: Enough, deadline_s: float | None = None) -> None:
        """Fill ``heard``; leave once it is ``enough``. deadline_s: of gRPC, told to the server.

        Raises PacelineError, httpx.HTTPError.
        """
        match turn.way:
            case "grpc stream":
                await self._grpc_stream(turn, ask, heard, enough, deadline_s)
            case "grpc whole":
                await self._grpc_whole(turn, ask, heard, deadline_s)
            case "http stream":
                await self._http_stream(turn, ask, heard, enough)
            case "http whole":
                await self._http_whole(turn, ask, heard)

    async def plainly(self, ask: Ask) -> Heard:
        """The whole answer, decoded one token a step."""
        heard = Heard(ask.options.get("n", 1))
        done = await self._grpc.generate(_grpc_prompt(ask), **{**ask.options, "num_draft_tokens": 0})
        _hear_all(done, heard)
        return heard

    async def _grpc_stream(self, turn: Turn, ask: Ask, heard: Heard, enough: Enough, deadline_s: float | None) -> None:
        async with self._grpc.stream(_grpc_prompt(ask), timeout=deadline_s, **_grpc_options(turn, ask)) as stream:
            async for chunk in stream:
                answer = heard.of(chunk.choice)
                if chunk.first_index != len(answer.token_ids):
                    heard.problems.append(f"token {chunk.first_index} came after {len(answer.token_ids)} tokens")
                answer.token_ids += chunk.token_ids
                answer.text += chunk.text
                if chunk.completion is not None:
                    answer.finish_reason = chunk.completion.finish_reason.value
                if enough(heard):
                    return
        heard.closed = True

    async def _grpc_whole(self, turn: Turn, ask: Ask, heard: Heard, deadline_s: float | None) -> None:
        done = await self._grpc.generate(_grpc_prompt(ask), timeout=deadline_s, **_grpc_options(turn, ask))
        _hear_all(done, heard)

    async def _http_stream(self, turn: Turn, ask: Ask, heard: Heard, enough: Enough) -> None:
        body = _http_body(turn, ask) | {"stream": True}
        async with self._http.stream("POST", _path(ask), json=body) as response:
            if response.status_code != 200:
                heard.problems.append(f"status {response.status_code}: {(await response.aread())[:200]!r}")
                return
            async with aclosing(_events(response)) as events:  # type: ignore[type-var]
                async for event in events:
                    _hear(event, heard)
                    if enough(heard):
                        return
        heard.closed = True

    async def _http_whole(self, turn: Turn, ask: Ask, heard: Heard) -> None:
        response = await self._http.post(_path(ask), json=_http_body(turn, ask))
        if response.status_code != 200:
            heard.problems.append(f"status {response.status_code}: {response.text[:200]}")
            return
        _hear(response.json(), heard)
        heard.closed = True


def _hear_all(done: Generation, heard: Heard) -> None:
    for choice in done.choices:
        answer = heard.of(choice.index)
        answer.token_ids, answer.text = list(choice.token_ids), choice.text
        answer.finish_reason = choice.completion.finish_reason.value
    heard.closed = True


def _grpc_prompt(ask: Ask) -> Any:
    return [{"role": "user", "content": ask.prompt}] if ask.kind == "chat" else ask.prompt


def _grpc_options(turn: Turn, ask: Ask) -> dict[str, Any]:
    return {**ask.options, "tenant": turn.tenant, "priority": turn.priority, "request_id": f"soak-{turn.number}"}


def _path(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.kind == "chat" else "/v1/completions"


def _http_body(turn: Turn, ask: Ask) -> dict[str, Any]:
    options = dict(ask.options)
    said: dict[str, Any] = {"prompt": ask.prompt}
    if ask.kind == "chat":
        said = {"messages": _grpc_prompt(ask)}
    if "drafter" in options:
        said["speculation"] = {"drafter": options.pop("drafter")}
    if "top_logprobs" in options:
        said["logprobs"] = options.pop("top_logprobs")
    return {**options, **said, "cache_salt": turn.tenant, "priority": turn.priority}


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _hear(event: dict[str, Any], heard: Heard) -> None:
    """A body, or an event of a stream."""
    if "error" in event:
        heard.problems.append(f"error: {event['error']}")
        return
    for choice in event["choices"]:
        answer = heard.of(choice["index"])
        if "text" in choice:
            answer.text += choice["text"]
        else:
            answer.text += (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    for index, token_ids in enumerate(event.get("paceline", {}).get("token_ids", ())):
        heard.of(index).token_ids = list(token_ids)
