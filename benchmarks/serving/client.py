"""Sends requests to an OpenAI-compatible server at their time, whatever is outstanding, and notes when tokens come.

An open loop: a slow server does not slow the arrivals down. Latency counts from the moment a request was due. What is
bounded: outstanding requests (``Limits.outstanding``; a request beyond them fails at once, as behind a full queue) and
the time of each (``Limits.deadline_s``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from benchmarks.serving.workload import Ask

API = Literal["chat", "completions"]
MAX_EVENT_BYTES = 1 << 22
ERROR_CHARACTERS = 200  # of a server's answer in an outcome


@dataclass(frozen=True)
class Limits:
    """Bounds of a run."""

    outstanding: int = 256
    deadline_s: float = 120.0


@dataclass(frozen=True)
class Server:
    """Where to send, and what."""

    url: str  # http://host:port, without /v1
    model: str = ""  # empty: not named
    api: API = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False

    def endpoint(self) -> str:
        """Address of the requests."""
        base = self.url.rstrip("/").removesuffix("/v1")
        return f"{base}/v1/{'chat/completions' if self.api == 'chat' else 'completions'}"

    def body(self, ask: Ask) -> dict[str, Any]:
        """One request."""
        prompt: dict[str, Any] = {"prompt": ask.text}
        if self.api == "chat":
            prompt = {"messages": [{"role": "user", "content": ask.text}]}
        return {
            **({"model": self.model} if self.model else {}),
            **prompt,
            "max_tokens": ask.max_tokens,
            "temperature": self.temperature,
            "seed": ask.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


@dataclass
class Outcome:
    """What became of a request. Times are seconds after the request was due, except ``late_s``."""

    ask: Ask
    late_s: float = 0.0  # the driver's own lateness: sent after it was due
    stamps: list[float] = field(default_factory=list)  # when each event with text came
    end_s: float = 0.0
    prompt_tokens: int = 0  # by the server's usage; by --model's tokenizer where it tells none
    output_tokens: int = 0
    counted: bool = False  # whether output_tokens is the server's count, not the number of events
    text: str = ""
    error: str = ""  # empty: completed


class Rejected(Exception):
    """The server answered with something else than a stream."""


async def drive(
    server: Server,
    asks: Sequence[Ask],
    limits: Limits,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send every request at its time; outcomes in the order of ``asks``. ``done`` hears of each as it ends."""
    loop = asyncio.get_running_loop()
    outcomes = [Outcome(ask, prompt_tokens=ask.prompt_tokens) for ask in asks]
    outstanding: set[asyncio.Task[None]] = set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        began = loop.time()
        try:
            for outcome in outcomes:
                due = began + outcome.ask.at_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                outcome.late_s = loop.time() - due
                if len(outstanding) >= limits.outstanding:
                    outcome.error = f"{limits.outstanding} requests are outstanding"
                    done(outcome)
                    continue
                task = asyncio.create_task(_bounded(session, server, outcome, due, limits, done))
                outstanding.add(task)
                task.add_done_callback(outstanding.discard)
            await asyncio.gather(*outstanding)
        finally:
            for task in outstanding:
                task.cancel()
            await asyncio.gather(*outstanding, return_exceptions=True)
    return outcomes


async def _bounded(
    session: aiohttp.ClientSession,
    server: Server,
    outcome: Outcome,
    due: float,
    limits: Limits,
    done: Callable[[Outcome], None],
) -> None:
    try:
        async with asyncio.timeout_at(due + limits.deadline_s):
            await _ask(session, server, outcome, due)
    except TimeoutError:
        outcome.error = f"not complete {limits.deadline_s:g} s after it was due"
    except (aiohttp.ClientError, Rejected, OSError, ValueError) as error:
        outcome.error = str(error)[:ERROR_CHARACTERS] or type(error).__name__
    outcome.end_s = asyncio.get_running_loop().time() - due
    done(outcome)


async def _ask(session: aiohttp.ClientSession, server: Server, outcome: Outcome, due: float) -> None:
    """Send one request and read its stream. Raises Rejected, aiohttp.ClientError, ValueError."""
    loop = asyncio.get_running_loop()
    pieces: list[str] = []
    finished = False
    async with session.post(server.endpoint(), json=server.body(outcome.ask)) as response:
        if response.status != 200:
            raise Rejected(f"status {response.status}: {(await response.text())[:ERROR_CHARACTERS]}")
        async for event in events(response.content):
            at_s = loop.time() - due
            if event.get("error"):
                raise Rejected(json.dumps(event["error"])[:ERROR_CHARACTERS])
            usage = event.get("usage")
            if usage:
                outcome.prompt_tokens = usage.get("prompt_tokens") or outcome.prompt_tokens
                outcome.output_tokens = usage.get("completion_tokens") or 0
                outcome.counted = True
            for choice in event.get("choices") or ():
                piece = _text(choice)
                if piece:
                    pieces.append(piece)
                    outcome.stamps.append(at_s)
                finished = finished or bool(choice.get("finish_reason"))
    outcome.text = "".join(pieces)
    if not outcome.counted:
        outcome.output_tokens = len(outcome.stamps)
    if not finished:
        raise Rejected("the stream ended without a finish reason")


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    found = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return found if isinstance(found, str) else ""


async def events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, until ``[DONE]``. Raises ValueError."""
    buffer = b""
    async for chunk in stream.iter_any():
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            event = json.loads(value)
            if isinstance(event, dict):
                yield event
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")


async def served_model(url: str, timeout_s: float = 10.0) -> str:
    """The first model that a server lists; empty where it lists none. Raises aiohttp.ClientError, TimeoutError."""
    base = url.rstrip("/").removesuffix("/v1")
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{base}/v1/models") as response:
        if response.status != 200:
            return ""
        models = (await response.json(content_type=None)).get("data") or [{}]
    return str(models[0].get("id", ""))


def answers(url: str) -> bool:
    """Whether a server lists its models by now."""
    try:
        return bool(asyncio.run(served_model(url, 2.0)))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return False
