"""Asking a router over scripted nodes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from cluster.contract.generation import GenerationRequest
from paceline.request import SamplingParams
from paceline.results import Chunk, Generation
from tests.support.scripted_nodes import Fleet, letters

PROMPT = "hello"
TEXT = letters(5, len(PROMPT), 64)


def ask(max_tokens: int | None = 10, *, prompt: Any = PROMPT, tenant: str = "", **sampling: Any) -> GenerationRequest:
    params = SamplingParams(**({"seed": 5} | sampling))
    return GenerationRequest(prompt, params, max_tokens, tenant=tenant)


async def answer(made: Fleet, request: GenerationRequest) -> Generation:
    async with asyncio.timeout(10):
        return await made.router.complete(request)


async def chunks(made: Fleet, request: GenerationRequest) -> list[Chunk]:
    async with aclosing(made.router.generate(request)) as stream:
        return [chunk async for chunk in stream]


def check_indexes(got: list[Chunk]) -> None:
    """Every index exactly once, in order."""
    index = 0
    for chunk in got:
        assert chunk.first_index == index
        index += len(chunk.token_ids)
