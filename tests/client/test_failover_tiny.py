"""A router dies in front of real nodes with a tiny model: tokens, text and logprobs are those of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from paceline.client import AsyncClient, Chunk, FinishReason
from paceline.config import ServeConfig
from tests.fakes.redis_servers import Embedded
from tests.support.needs import needs_kernels
from tests.support.tiny_routers import tiny_routers
from tests.support.two_routers import StallingRouter, two_routers

PROMPT = [5, 9, 70, 41, 9, 70, 5, 9, 70, 88, 120]
TOKENS = 10
PENALTIES = {"presence_penalty": 0.9, "frequency_penalty": 0.6, "repetition_penalty": 1.3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("none", {"temperature": 0.0}),
    "sampled": ("none", {"temperature": 1.0, "top_p": 0.9, "logit_bias": {7: 2.0}, "min_tokens": 4}),
    "greedy-penalties": ("ngram", {"temperature": 0.0, **PENALTIES}),
    "sampled-penalties-two": ("ngram", {"temperature": 1.0, "n": 2, **PENALTIES}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Embedded]:
    with Embedded() as made:
        yield made


@dataclass(frozen=True)
class Answer:
    """All that a user sees of one choice."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[Any, ...]
    finish_reason: FinishReason
    usage: tuple[int, int]
    seed: int


def answers(chunks: list[Chunk]) -> list[Answer]:
    found = []
    for choice in sorted({chunk.choice for chunk in chunks}):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        index = 0
        for chunk in own:
            assert chunk.first_index == index
            index += len(chunk.token_ids)
        done = own[-1].completion
        assert done is not None
        assert [chunk.completion for chunk in own[:-1]] == [None] * (len(own) - 1)
        found.append(
            Answer(
                tuple(token_id for chunk in own for token_id in chunk.token_ids),
                "".join(chunk.text for chunk in own),
                tuple(entry for chunk in own for entry in chunk.logprobs),
                done.finish_reason,
                (done.usage.prompt_tokens, done.usage.completion_tokens),
                done.seed,
            )
        )
    return found


class Asker:
    """Makes the same request, undisturbed or with a router that dies."""

    def __init__(self, make: Callable[..., StallingRouter], url: str, options: dict[str, Any]) -> None:
        self._make, self._url = make, url
        self._options = {"max_tokens": TOKENS, "seed": 21, "top_logprobs": 2, "ignore_eos": True} | options

    async def ask(self, upto: int | None = None) -> tuple[list[Answer], int]:
        """Answers, and the number of chunks. upto: of them that the first router delivers before it dies."""
        config = ServeConfig(model="tiny")
        async with (
            asyncio.timeout(30),
            two_routers(self._make, config, self._url) as two,
            AsyncClient(two.addresses) as client,
        ):
            two.a.router.stall_after = upto
            dying = asyncio.create_task(two.a.die_when_stalled())
            async with client.stream(PROMPT, **self._options) as stream:
                chunks = [chunk async for chunk in stream]
            assert two.a.router.stalled.is_set() == (upto is not None)
            if upto is None:
                dying.cancel()
            else:
                await dying
            return answers(chunks), len(chunks)


@needs_kernels
@pytest.mark.parametrize("case", CASES)
async def test_a_router_dies_at_every_index(redis_server: Embedded, case: str) -> None:
    drafter, options = CASES[case]
    async with tiny_routers(drafter) as make:
        asker = Asker(make, redis_server.url, options)
        undisturbed, count = await asker.ask()
        assert [len(answer.token_ids) for answer in undisturbed] == [TOKENS] * options.get("n", 1)
        for upto in range(count):
            assert (await asker.ask(upto))[0] == undisturbed, upto


@needs_kernels
async def test_a_stop_string_across_the_cut(redis_server: Embedded) -> None:
    async with tiny_routers("none") as make:
        options = {"temperature": 1.0, "seed": 4, **PENALTIES}
        (free,), _ = await Asker(make, redis_server.url, options).ask()
        at = next(i for i in range(3, len(free.text) - 3) if free.text.index(free.text[i : i + 3]) == i)
        asker = Asker(make, redis_server.url, {**options, "stop": free.text[at : at + 3]})
        undisturbed, count = await asker.ask()
        assert undisturbed[0].text == free.text[:at]
        assert undisturbed[0].finish_reason is FinishReason.STOP
        assert len(undisturbed[0].token_ids) < TOKENS
        for upto in range(count):
            assert (await asker.ask(upto))[0] == undisturbed, upto
