"""Streams of mixed requests, each compared token by token with what the same request gave undisturbed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.client import AsyncClient, PacelineError
from paceline.request import TokenLogprobs

STREAM_TIMEOUT_S = 300.0
VOCABULARY = range(3, 250)


@dataclass
class Answer:
    """One choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


@dataclass(frozen=True)
class Move:
    """A stream that another router went on with. Times, of the last chunk of one and the first of the other, are Unix
    time."""

    source: str
    target: str
    last: float
    first: float


@dataclass
class Served:
    """One request as its client saw it. Times are Unix time, as those of traces."""

    request_id: str
    kind: str
    began: float
    ended: float = 0.0
    answers: dict[int, Answer] = field(default_factory=dict)
    arrivals: dict[int, list[float]] = field(default_factory=dict)  # of chunks, by choice
    problems: list[str] = field(default_factory=list)
    at: Callable[[], str] = str  # names the router that it is at now
    moves: list[Move] = field(default_factory=list)
    tries: list[tuple[float, str]] = field(default_factory=list)  # why its client left routers, and when
    _last: tuple[str, float] = ("", 0.0)  # router and time of the last chunk

    def arrived(self, choice: int) -> None:
        """A chunk came."""
        router, now = self.at(), time.time()
        before, last = self._last
        if before not in ("", router):
            self.moves.append(Move(before, router, last, now))
        self._last = router, now
        self.arrivals.setdefault(choice, []).append(now)


@dataclass(frozen=True)
class Request:
    """What is asked."""

    kind: str
    prompt: tuple[int, ...]
    options: dict[str, Any]


# Each kind of request: tokens of the prompt, tokens of the answer, and what is special about it.
SAMPLED, GREEDY = {"temperature": 1.0}, {"temperature": 0.0}
KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "greedy": (20, 500, GREEDY),
    "sampled": (60, 350, SAMPLED),
    "two": (40, 200, SAMPLED | {"n": 2}),
    "penalties": (80, 250, {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
    "stop": (30, 400, SAMPLED | {"stop": ["q", "Zx"]}),
    "logprobs": (50, 150, SAMPLED | {"top_logprobs": 2}),
    "long prompt": (1200, 30, GREEDY),
    "ngram": (60, 500, GREEDY | {"drafter": "ngram"}),
    "short": (16, 2, SAMPLED),
}


def make_requests(seed: int, count: int) -> list[Request]:
    """``count`` requests of all kinds in turn, half to one and a half times as long as their kind says."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        prompt_tokens, max_tokens, special = KINDS[kind]
        words = [rng.choice(VOCABULARY) for _ in range(int(prompt_tokens * rng.uniform(0.5, 1.5)))]
        prompt = words[:12] * 5 if kind == "ngram" else words  # which finds what repeats
        length = max(1, int(max_tokens * rng.uniform(0.5, 1.5)))
        options = {"seed": rng.randrange(1 << 30), "ignore_eos": True, "max_tokens": length} | special
        requests.append(Request(kind, tuple(prompt), options))
    return requests


async def serve(client: AsyncClient, request: Request, served: Served, routers: Sequence[str] = ()) -> None:
    """One request to its end. What is lost, doubled or out of order is among the problems of ``served``. routers: names
    of the client's, in its order."""
    try:
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            stream = client.stream(request.prompt, request_id=served.request_id, **request.options)
            served.at = (lambda: routers[stream._place.router]) if routers else served.at
            async for chunk in stream:
                answer = served.answers.setdefault(chunk.choice, Answer())
                served.arrived(chunk.choice)
                if chunk.first_index != len(answer.token_ids):
                    served.problems.append(f"token {chunk.first_index} came after {len(answer.token_ids)} tokens")
                answer.token_ids += chunk.token_ids
                answer.text += chunk.text
                answer.logprobs += chunk.logprobs
                if chunk.completion is not None:
                    answer.finish_reason = str(chunk.completion.finish_reason)
    except (PacelineError, TimeoutError) as error:
        served.problems.append(f"lost: {error!r}")
    served.ended = time.time()
    if not served.problems and any(not answer.finish_reason for answer in served.answers.values()):
        served.problems.append("lost: a choice without an end")


def differences(served: Served, expected: Served) -> list[str]:
    """What is wrong with an answer."""
    found = list(served.problems)
    if found:
        return found
    if served.answers.keys() != expected.answers.keys():
        return [f"choices {sorted(served.answers)} where {sorted(expected.answers)} were due"]
    for choice, answer in served.answers.items():
        right = expected.answers[choice]
        for name in ("token_ids", "text", "finish_reason", "logprobs"):
            if getattr(answer, name) != getattr(right, name):
                found.append(
                    f"choice {choice}: {name} {_first_difference(getattr(answer, name), getattr(right, name))}"
                )
    return found


def _first_difference(got: Sequence[Any], right: Sequence[Any]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return f"differ at {at} of {len(right)}: {got[at : at + 3]!r} where {right[at : at + 3]!r} is right"


Ask = Callable[[int, Served], Awaitable[None]]  # makes the request of that number, and fills in how it went


class Load:
    """So many streams at once, request after request, until told to stop."""

    def __init__(self, ask: Ask, expected: Sequence[Served], seed: int, name: str = "chaos") -> None:
        """expected: of each request."""
        self._ask, self._expected, self._name = ask, expected, name
        self._rng = random.Random(seed)
        self.under_way: dict[str, Served] = {}
        self.done: list[Served] = []
        self.wrong: list[str] = []
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, streams: int, on_end: Callable[[Served], None] = lambda served: None) -> None:
        """Begin; ``on_end`` is called with each request that ended."""
        self._tasks = [asyncio.create_task(self._stream(number, on_end)) for number in range(streams)]

    async def stop(self) -> None:
        """Let what is under way end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, stream: int, on_end: Callable[[Served], None]) -> None:
        turn = 0
        while not self._stopping:
            which = self._rng.randrange(len(self._expected))
            right = self._expected[which]
            served = Served(f"{self._name}-{stream}-{turn}", right.kind, time.time())
            self.under_way[served.request_id] = served
            await self._ask(which, served)
            del self.under_way[served.request_id]
            turn += 1
            self.done.append(served)
            self.wrong += [f"{served.request_id} ({served.kind}): {what}" for what in differences(served, right)]
            on_end(served)


async def undisturbed(ask: Ask, kinds: Sequence[str], streams: int) -> list[Served]:
    """What requests of these kinds give without faults, ``streams`` at once."""
    limit = asyncio.Semaphore(streams)

    async def one(number: int, kind: str) -> Served:
        async with limit:
            served = Served(f"undisturbed-{number}", kind, time.time())
            await ask(number, served)
        return served

    began = time.monotonic()
    served = await asyncio.gather(*(one(number, kind) for number, kind in enumerate(kinds)))
    tokens = sum(len(answer.token_ids) for one in served for answer in one.answers.values())
    print(f"undisturbed: {len(served)} requests, {tokens} tokens in {time.monotonic() - began:.1f} s")
    assert [problem for one in served for problem in differences(one, one)] == []
    return served
