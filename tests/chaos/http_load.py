"""Streams over HTTP whose client goes on at another router with ``Last-Event-ID``, as a careful client would.

A stream moves when its connection breaks, when it is told an error that may pass, and when its router answers no
``/ping`` any more. Its text, characters counted, must be that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.load import STREAM_TIMEOUT_S, Answer, Served

PING_S, PING_EVERY_S = 0.7, 0.2  # the SDK waits as long for its health service
PAUSE_S = 0.1  # before a stream is asked for again
PASSING = (429, 500, 502, 503, 504)  # statuses that another try may not have
RESUME = "last-event-id"


@dataclass(frozen=True)
class HttpRequest:
    """What is asked."""

    kind: str
    path: str
    body: dict[str, Any]


CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USAGE = {"stream_options": {"include_usage": True}}
# Shorter than those over gRPC: a stream that goes on makes its text again, and is to do so before the next fault.
KINDS: dict[str, tuple[str, int, int, dict[str, Any]]] = {  # path, tokens of prompt and answer, what is special
    "chat": (CHAT, 40, 200, {"temperature": 0.0}),
    "completion": (TEXT, 60, 200, {"temperature": 1.0}),
    "chats": (CHAT, 60, 100, {"temperature": 1.0, "n": 3, "logprobs": True, "top_logprobs": 1} | USAGE),
    "completion stop": (TEXT, 30, 200, {"temperature": 1.0, "stop": ["q", "Zx"], "return_token_ids": True}),
    "completion logprobs": (TEXT, 200, 120, {"temperature": 0.8, "frequency_penalty": 0.4, "logprobs": 2} | USAGE),
    "chat ngram": (CHAT, 100, 250, {"temperature": 0.0}),
    "response": (RESPONSES, 60, 200, {"temperature": 1.0, "store": False}),
}
LETTERS = "abcdefghij klmnopqrst uvwxyz ÄÖÜ"


def make_http_requests(seed: int, count: int) -> list[HttpRequest]:
    """``count`` requests of all kinds in turn, half to one and a half times as long as their kind says."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        path, prompt_tokens, max_tokens, special = KINDS[kind]
        text = "".join(rng.choice(LETTERS) for _ in range(int(prompt_tokens * rng.uniform(0.5, 1.5))))
        length = max(1, int(max_tokens * rng.uniform(0.5, 1.5)))
        asked = {"seed": rng.randrange(1 << 30), "stream": True}
        prompt: dict[str, Any]
        if path == RESPONSES:
            prompt = {"input": text, "max_output_tokens": length}
        else:
            prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
            prompt |= {"ignore_eos": True, "max_tokens": length}
        requests.append(HttpRequest(kind, path, prompt | asked | special))
    return requests


@dataclass
class HttpRouters:
    """Who answers: routers by name, each asked again and again whether it is there."""

    addresses: dict[str, str]
    errors: Counter[str] = field(default_factory=Counter)  # that streams were told
    _down: dict[str, asyncio.Event] = field(default_factory=dict)

    async def watch(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self.addresses:
                group.create_task(self._watch(name))

    async def _watch(self, name: str) -> None:
        down = self.down(name)
        async with httpx.AsyncClient(timeout=PING_S) as client:
            while True:
                try:
                    await client.get(f"http://{self.addresses[name]}/ping")
                    down.clear()
                except httpx.HTTPError:
                    down.set()
                await asyncio.sleep(PING_EVERY_S)

    def down(self, name: str) -> asyncio.Event:
        """Set while the router does not answer."""
        return self._down.setdefault(name, asyncio.Event())

    def choose(self, rng: random.Random, but: str) -> str:
        """One that answers, another than ``but`` if there is one."""
        names = [name for name in self.addresses if not self.down(name).is_set()] or list(self.addresses)
        return rng.choice([name for name in names if name != but] or names)


class _Broken(Exception):
    """The rest of the stream is to be had elsewhere."""


class HttpStream:
    """One request, asked until it is answered to its end. What is lost, doubled or out of order is among the problems
    of ``served``."""

    def __init__(self, routers: HttpRouters, client: httpx.AsyncClient, request: HttpRequest, served: Served) -> None:
        self._routers, self._client, self._request, self._served = routers, client, request, served
        self._rng = random.Random(served.request_id)
        self._at = routers.choose(self._rng, but="")
        self._last_id = ""
        self._over = False
        self._number = -1  # of the last event of a response
        served.at = lambda: self._at

    async def run(self) -> None:
        """Until it is complete, or lost."""
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                while not self._over:
                    try:
                        await self._ask()
                    except _Broken as broken:
                        self._routers.errors[str(broken)] += 1
                        self._served.tries.append((time.time(), f"{self._at}: {broken}"))
                        await asyncio.sleep(PAUSE_S)
                        self._at = self._routers.choose(self._rng, but=self._at)
        except (TimeoutError, AssertionError) as error:
            self._served.problems.append(f"lost: {error!r}")
        self._served.ended = time.time()
        if not self._served.problems and any(not one.finish_reason for one in self._served.answers.values()):
            self._served.problems.append("lost: a choice without an end")

    async def _ask(self) -> None:
        """Ask for what is missing, until it is there or the router is not. Raises _Broken."""
        reading = asyncio.create_task(self._read())
        down = asyncio.create_task(self._routers.down(self._at).wait())
        try:
            await asyncio.wait({reading, down}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _Broken("answers no ping")
            reading.result()
        finally:
            for task in (reading, down):
                task.cancel()
            await asyncio.gather(reading, down, return_exceptions=True)

    async def _read(self) -> None:
        headers = {"x-request-id": self._served.request_id} | ({RESUME: self._last_id} if self._last_id else {})
        url = f"http://{self._routers.addresses[self._at]}{self._request.path}"
        try:
            async with self._client.stream("POST", url, json=self._request.body, headers=headers) as reply:
                if reply.status_code in PASSING:
                    raise _Broken(f"HTTP {reply.status_code}")
                assert reply.status_code == 200, (await reply.aread()).decode()
                await self._take(reply.aiter_text())
        except httpx.HTTPError as error:
            raise _Broken(type(error).__name__) from None
        if not self._over:
            raise _Broken("ended without [DONE]")

    async def _take(self, parts: AsyncIterator[str]) -> None:
        """Events count once they are whole: a client acts on nothing less."""
        text = ""
        async for part in parts:
            *events, text = (text + part).split("\n\n")
            for event in events:
                self._event(dict(line.split(": ", 1) for line in event.split("\n")))

    def _event(self, fields: dict[str, str]) -> None:
        assert not self._over, "an event after [DONE]"
        if fields.get("event") == "error":
            raise _Broken("error event: " + json.loads(fields["data"])["error"]["message"][:60])
        if fields["data"] == "[DONE]":
            self._over = True
            return
        data, served = json.loads(fields["data"]), self._served
        if fields.get("id"):
            self._last_id = fields["id"]
        if self._request.path == RESPONSES:
            self._response_event(data)
            return
        for choice in data["choices"]:
            answer = served.answers.setdefault(choice["index"], Answer())
            served.arrived(choice["index"])
            if answer.finish_reason:
                served.problems.append(f"choice {choice['index']} went on after its end")
            said = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            answer.text += said or ""
            answer.logprobs += _entries(choice.get("logprobs"))
            answer.finish_reason = choice["finish_reason"] or ""
        if "paceline" in data:
            for index, token_ids in enumerate(data["paceline"]["token_ids"]):
                served.answers[index].token_ids = token_ids

    def _response_event(self, data: dict[str, Any]) -> None:
        served, kind = self._served, data["type"].removeprefix("response.")
        answer = served.answers.setdefault(0, Answer())
        if data["sequence_number"] != self._number + 1:
            served.problems.append(f"event {data['sequence_number']} after {self._number}")
        self._number = data["sequence_number"]
        if kind == "failed":
            raise _Broken("response.failed: " + data["response"]["error"]["message"][:60])
        if kind == "output_text.delta":
            served.arrived(0)
            answer.text += data["delta"]
        if kind in ("completed", "incomplete"):
            parts = [part["text"] for item in data["response"]["output"] for part in item["content"]]
            if "".join(parts) != answer.text:
                served.problems.append("the deltas are not the text at the end")
            answer.finish_reason, self._over = kind, True


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    """The log-probabilities of one event, one a token."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], strict=True))


async def serve_http(
    routers: HttpRouters, client: httpx.AsyncClient, requests: Sequence[HttpRequest], which: int, served: Served
) -> None:
    """``requests[which]`` to its end."""
    await HttpStream(routers, client, requests[which], served).run()
