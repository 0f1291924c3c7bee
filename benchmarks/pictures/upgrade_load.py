"""Streams over gRPC and HTTP that go on at another router when theirs ends, and whose answers must never change."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import httpx

from paceline.client import AsyncClient, PacelineError

MAX_TOKENS = 96
REQUESTS = 3  # of each client, in turn
PROMPT = "Tell me about the history of bicycle racing, stage by stage."
AGAIN_S, STREAM_TIMEOUT_S = 0.1, 60.0
PASSING = (429, 500, 502, 503, 504)  # statuses that another try may not have


@dataclass(frozen=True)
class Ended:
    """One stream. over: ``grpc`` or ``http``."""

    at_s: float
    failed: str  # why; empty for one that was whole
    tokens: int
    longest_pause_s: float
    over: str = "grpc"


class _Broken(Exception):
    """The rest is to be had elsewhere."""


class Clients:
    """Each asks the same few requests again and again, and begins at a router of its own. A stream whose answer is not
    the first one's has failed."""

    def __init__(self, grpc: Mapping[str, str], http: Mapping[str, str]) -> None:
        """Addresses of all routers, by name."""
        self._grpc, self._http = grpc, http
        self._answers: dict[int, Any] = {}  # by seed

    async def stream(self, client: int, turn: int) -> Ended:
        """The next stream of a client: over gRPC for even ones, over HTTP for odd ones."""
        seed, over = client * REQUESTS + turn % REQUESTS, ("grpc", "http")[client % 2]
        answer, tokens, longest_s, last, failed = list[Any](), 0, 0.0, 0.0, ""
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                async for count, said in (
                    self._over_grpc(client, seed) if over == "grpc" else self._over_http(client, seed)
                ):
                    now = time.monotonic()
                    longest_s, last = max(longest_s, now - last if last else 0.0), now
                    answer += said
                    tokens += count
        except (PacelineError, TimeoutError) as error:
            failed = repr(error)
        failed = failed or ("" if tokens == MAX_TOKENS else f"{tokens} tokens")
        if not failed and answer != self._answers.setdefault(seed, answer):
            failed = "another answer than the first time"
        return Ended(0.0, failed, tokens, round(longest_s, 3), over)

    async def _over_grpc(self, client: int, seed: int) -> AsyncIterator[tuple[int, list[int]]]:
        """Tokens, and how many."""
        async with AsyncClient(_from(client, self._grpc)) as asking:
            async for chunk in asking.stream(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed):
                yield len(chunk.token_ids), list(chunk.token_ids)

    async def _over_http(self, client: int, seed: int) -> AsyncIterator[tuple[int, str]]:
        """Characters; how many tokens they are comes at the end."""
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "seed": seed, "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        headers: dict[str, str] = {}
        async with httpx.AsyncClient(timeout=STREAM_TIMEOUT_S) as asking:
            for address in cycle(_from(client, self._http)):
                try:
                    async for fields in _events(asking, f"http://{address}/v1/completions", body, headers):
                        if fields["data"] == "[DONE]":
                            return
                        data = json.loads(fields["data"])
                        if "id" in fields:
                            headers["last-event-id"] = fields["id"]
                        usage = data.get("usage") or {}
                        yield usage.get("completion_tokens", 0), "".join(one["text"] for one in data["choices"])
                except (httpx.HTTPError, _Broken):
                    pass
                await asyncio.sleep(AGAIN_S)


def _from(client: int, routers: Mapping[str, str]) -> list[str]:
    """Addresses of all routers, from that of this client on. Clients of one kind are every second one."""
    found, first = list(routers.values()), client // 2 % len(routers)
    return found[first:] + found[:first]


async def _events(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[dict[str, str]]:
    """Whole events. Raises _Broken, httpx.HTTPError."""
    async with client.stream("POST", url, json=body, headers=headers) as reply:
        if reply.status_code in PASSING:
            raise _Broken
        reply.raise_for_status()
        text = ""
        async for part in reply.aiter_text():
            *events, text = (text + part).split("\n\n")
            for event in events:
                fields = dict(line.split(": ", 1) for line in event.split("\n"))
                if fields.get("event") == "error":
                    raise _Broken
                yield fields
