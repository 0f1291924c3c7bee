"""Schemas and tools x every drafter x prefill and decode apart, with nodes that are killed in mid-stream: each answer
is judged by its schema, and compared with that of one plain process. ``tests.soak.answer_grid`` is the command.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from cluster.verification.answers import Answer
from cluster.verification.sides import Plain
from paceline.client import AsyncClient, Chunk, ModelInfo, choices_of
from paceline.errors import PacelineError
from paceline.text.tokenizer import Tokenizer
from tests.soak.json_asks import JsonAsk
from tests.soak.kills import nodes_killed
from tests.soak.tally import Outcome, request_id_of
from tests.support.server import serve

PLAIN_PROCESSES, PLAIN_PART = 2, 50  # of the plain side; requests from which on a process of its own pays
TELL_EVERY_S = 15.0
PATIENCE_S = 240.0
PREDICTION = "prediction"
SPOILED = 0.05  # of a prediction's tokens are missing, and as many are others
COPYING = ("none", "ngram", "suffix", "trie", "lookahead")


@dataclass(frozen=True)
class Grid:
    """One deployment of the run. Its own drafter drafts what names no other, and what has a prediction."""

    drafter: str
    options: Mapping[str, object]  # of paceline serve
    others: tuple[str, ...] = ()  # weightless drafters that requests name

    @property
    def asked(self) -> tuple[str, ...]:
        """What the requests draft with."""
        return (self.drafter, *self.others, PREDICTION) if self.others else (self.drafter,)


STATIC: dict[str, object] = {"tree": "static", "tree-width": 2, "num-draft-tokens": 3}
GRIDS = (
    Grid("eagle3", {**STATIC, "num-draft-tokens": 4}, COPYING),
    Grid("eagle", {"num-draft-tokens": 3}),
    Grid("mtp", {"tree": "dynamic", "tree-width": 3, "num-draft-tokens": 4}),
    Grid("medusa", STATIC),
    Grid("draft_model", {"num-draft-tokens": 4}),
    Grid("auto", {"tree": "dynamic", "tree-width": 2}),
)
FIXED: dict[str, object] = {"prefill-nodes": 1, "decode-nodes": 2, "threads-per-node": 1, "max-model-len": 2048}
NODES = 3
FIXED |= {"kv-cache-tokens": 16384, "request-timeout-s": 230}


async def plain_answers(folder: Path, address: str, asks: Sequence[JsonAsk]) -> list[list[Answer]]:
    """What one process without a drafter answers, one sequence at a time. Many requests are dealt to two of them.

    address: of a deployment of the same model, for its limits.
    """
    async with AsyncClient(address) as client:
        info = await client.model_info()
    if len(asks) < PLAIN_PART * PLAIN_PROCESSES:
        return await _plain_part(folder, info, asks)
    parts = [asks[i::PLAIN_PROCESSES] for i in range(PLAIN_PROCESSES)]
    with ProcessPoolExecutor(PLAIN_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        loop = asyncio.get_running_loop()
        work = [loop.run_in_executor(pool, _plain_process, folder, info, part) for part in parts]
        answered = dict(chain.from_iterable(await asyncio.gather(*work)))
    return [answered[ask.asked.number] for ask in asks]


def _plain_process(folder: Path, info: ModelInfo, asks: Sequence[JsonAsk]) -> list[tuple[int, list[Answer]]]:
    torch.set_num_threads(1)
    right = asyncio.run(_plain_part(folder, info, asks))
    return [(ask.asked.number, answers) for ask, answers in zip(asks, right, strict=True)]


async def _plain_part(folder: Path, info: ModelInfo, asks: Sequence[JsonAsk]) -> list[list[Answer]]:
    plain = Plain(folder, info)
    await plain.load([ask.asked for ask in asks])
    return [await plain.answer(ask.asked, {}) for ask in asks]


def predictions(folder: Path, right: Sequence[Sequence[Answer]], seed: int) -> dict[int, str]:
    """What requests predict by their place: their answers, with tokens that are missing and others that are wrong."""
    tokenizer, rng = Tokenizer.from_folder(folder), random.Random(seed)
    predicted = {}
    for at, answers in enumerate(right):
        kept = [token for token in answers[0].token_ids if rng.random() > SPOILED]
        changed = [kept[0] if rng.random() < SPOILED else token for token in kept]
        predicted[at] = tokenizer.decode(changed) or "{"
    return predicted


async def ask_all(
    address: str,
    asks: Sequence[JsonAsk],
    right: Sequence[list[Answer]],
    drafters: Sequence[str],
    outcome: Outcome,
    predicted: Mapping[int, str],
    at_once: int,
) -> None:
    """Every request with every drafter, ``at_once`` streams at a time. predicted: what requests predict by their
    place, for PREDICTION."""
    turns = iter([(drafter, at) for at in range(len(asks)) for drafter in drafters])
    async with AsyncClient(address) as client:

        async def work() -> None:
            for drafter, at in turns:
                extra = {"drafter": drafter} if drafter != PREDICTION else {"prediction": predicted[at]}
                options = {**asks[at].asked.options, **extra, "request_id": request_id_of(drafter, at)}
                try:
                    got = choices_of(await _heard(client, asks[at], options, outcome.streams.with_tokens))
                except PacelineError as error:
                    outcome.lose(asks[at], drafter, error)
                else:
                    outcome.note(asks[at], drafter, got, right[at])

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(work())


async def _heard(client: AsyncClient, ask: JsonAsk, options: Any, with_tokens: set[str]) -> list[Chunk]:
    """A whole stream. It is among ``with_tokens`` from its first chunk on."""
    name, chunks = options["request_id"], list[Chunk]()
    try:
        async for chunk in client.stream(ask.asked.prompt, timeout=PATIENCE_S, **options):
            chunks.append(chunk)
            with_tokens.add(name)
    finally:
        with_tokens.discard(name)
    return chunks


@asynccontextmanager
async def _told(name: str, due: int, outcome: Outcome) -> AsyncIterator[None]:
    """A line of progress now and then."""
    began = time.monotonic()

    def tell() -> None:
        rate, kills = outcome.answers / (time.monotonic() - began), outcome.streams.kills.total()
        print(
            f"{name}: {outcome.answers:,} of {due:,} answers, {rate:.1f} a second, {kills} kills, "
            f"{len(outcome.wrong)} wrong",
            flush=True,
        )

    async def tell_on() -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            tell()

    telling = asyncio.create_task(tell_on())
    try:
        yield
        tell()
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


@dataclass
class GridRun:
    """A run over the deployments of one model."""

    model: str  # as `paceline serve` takes it
    folder: Path  # of the model
    heads: Mapping[str, Path]  # by drafter; those that are not there ship with the model
    dtype: str
    asks: Sequence[JsonAsk]
    seed: int
    at_once: int = 16  # streams
    kill_every_s: float = 4.0  # while all nodes are there
    _right: list[list[Answer]] = field(default_factory=list)

    async def ask(self, grid: Grid) -> Outcome:
        """Start a deployment, kill its nodes, and ask it everything."""
        outcome = Outcome()
        given = {"model": self.model, "dtype": self.dtype, "drafter": grid.drafter, **FIXED, **grid.options}
        if grid.others:
            given["drafters"] = ",".join(grid.others)
        if grid.drafter in self.heads:
            given["drafter-path"] = self.heads[grid.drafter]
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        with serve(*flags, "--no-head-check") as server:
            self._right = self._right or await plain_answers(self.folder, server.grpc, self.asks)
            predicted, rng = predictions(self.folder, self._right, self.seed), random.Random(self.seed)
            due = len(self.asks) * len(grid.asked)
            killed = nodes_killed(server, NODES, self.kill_every_s, rng, outcome.streams)
            async with _told(grid.drafter, due, outcome), killed:
                await ask_all(server.grpc, self.asks, self._right, grid.asked, outcome, predicted, self.at_once)
            outcome.count_moved(server.log.read_text())
        return outcome
