"""Schemas and tools x every drafter x prefill and decode apart, with nodes that are killed in mid-stream: each answer
is judged by its schema, and compared with that of one plain process. ``tests.soak.answer_grid`` is the command.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from cluster.verification.answers import Answer, largest_gap, parting
from cluster.verification.sides import Plain
from paceline.client import AsyncClient, choices_of
from paceline.errors import PacelineError
from paceline.results import Choice
from paceline.text.tokenizer import Tokenizer
from tests.soak.json_asks import JsonAsk
from tests.support.server import Server, serve

AT_ONCE = 8
KILL_EVERY_S = (2.0, 6.0)
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


@dataclass
class Tally:
    """What came of the answers of one drafter."""

    answers: int = 0
    valid: int = 0
    cut: int = 0  # by its length, or by a stop text
    invalid: int = 0
    different: int = 0
    lost: int = 0  # ended by an error
    rounds: int = 0
    committed: int = 0  # tokens of these rounds
    accepted: int = 0

    def add(self, other: Mapping[str, int]) -> None:
        """Count another run's as well."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Outcome:
    """What came of a run. ``wrong`` tells each answer that is."""

    by_drafter: dict[str, Tally] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)  # by role
    running_when_killed: int = 0  # sequences on nodes that were killed

    def of(self, drafter: str) -> Tally:
        """The tally of a drafter."""
        return self.by_drafter.setdefault(drafter, Tally())

    def note(self, ask: JsonAsk, drafter: str, got: Sequence[Choice], right: Sequence[Answer]) -> None:
        """Judge and compare one answer."""
        tally, answers = self.of(drafter), [Answer.of(choice) for choice in got]
        tally.answers += 1
        for choice in got:
            stats = choice.completion.speculation
            tally.rounds += stats.rounds
            tally.accepted += stats.accepted_tokens
            tally.committed += stats.rounds + stats.accepted_tokens
        found = parting(answers, right) or (largest_gap(answers, right) and "log-probabilities")
        if found:
            tally.different += 1
            self.wrong.append(f"{drafter}, {ask.asked.told}: {found}")
        words = {ask.judge(answer) for answer in answers}
        if wrong := words - {"valid", "cut"}:
            tally.invalid += 1
            self.wrong.append(f"{drafter}, {ask.asked.told}: {wrong}")
        elif "cut" in words:
            tally.cut += 1
        else:
            tally.valid += 1

    def lose(self, ask: JsonAsk, drafter: str, error: PacelineError) -> None:
        """An answer that was not whole."""
        self.of(drafter).answers += 1
        self.of(drafter).lost += 1
        self.wrong.append(f"{drafter}, {ask.asked.told}: {type(error).__name__}: {error}")

    def figures(self) -> dict[str, Any]:
        """For a file of results."""
        return {
            "kills": dict(self.kills),
            "sequences_on_killed_nodes": self.running_when_killed,
            "by_drafter": {name: asdict(tally) for name, tally in self.by_drafter.items()},
        }


def table(tallies: Mapping[str, Tally]) -> str:
    """One line a drafter."""
    lines = ["| drafter | answers | valid | cut | invalid | different | lost | tokens a round |", "|---|" + "---|" * 7]
    for name, t in tallies.items():
        a_round = f"{t.committed / t.rounds:.2f}" if t.rounds else "-"
        cells = (name, t.answers, t.valid, t.cut, t.invalid, t.different, t.lost, a_round)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


async def plain_answers(folder: Path, address: str, asks: Sequence[JsonAsk]) -> list[list[Answer]]:
    """What one process without a drafter answers. address: of a deployment of the same model, for its limits."""
    async with AsyncClient(address) as client:
        plain = Plain(folder, await client.model_info())
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
    predicted: Mapping[int, str] | None = None,
) -> None:
    """Every request with every drafter. predicted: what requests predict by their place, for PREDICTION."""
    turns = iter([(drafter, at) for at in range(len(asks)) for drafter in drafters])
    async with AsyncClient(address) as client:

        async def work() -> None:
            for drafter, at in turns:
                extra = {"drafter": drafter} if drafter != PREDICTION else {"prediction": (predicted or {})[at]}
                options: Any = {**asks[at].asked.options, **extra}
                try:
                    stream = client.stream(asks[at].asked.prompt, timeout=PATIENCE_S, **options)
                    got = choices_of([chunk async for chunk in stream])
                except PacelineError as error:
                    outcome.lose(asks[at], drafter, error)
                else:
                    outcome.note(asks[at], drafter, got, right[at])

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())


@asynccontextmanager
async def nodes_killed(server: Server, rng: random.Random, outcome: Outcome) -> AsyncIterator[None]:
    """Now and then, while all nodes are there, one that works is killed, by SIGKILL."""
    killing = asyncio.create_task(_kill_nodes(server, rng, outcome))
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


async def _kill_nodes(server: Server, rng: random.Random, outcome: Outcome) -> None:
    killed: set[str] = set()  # addresses, which are listed until their lease has run out
    async with AsyncClient(server.grpc) as client:
        while True:
            await asyncio.sleep(rng.uniform(*KILL_EVERY_S))
            nodes = (await client.model_info()).nodes
            busy = [node for node in nodes if node.running] or list(nodes)
            if len({node.address for node in nodes} - killed) < NODES:
                continue
            node = rng.choice(busy)
            port = int(node.address.rpartition(":")[2])
            if (process := await asyncio.to_thread(_listens, server, port)) is not None:
                process.kill()
                killed.add(node.address)
                outcome.kills[node.role] += 1
                outcome.running_when_killed += node.running


def _listens(server: Server, port: int) -> psutil.Process | None:
    for process in server.processes():
        with suppress(psutil.Error):
            connections = process.net_connections()
            if any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections):
                return process
    return None


@dataclass
class GridRun:
    """A run over the deployments of one model."""

    model: str  # as `paceline serve` takes it
    folder: Path  # of the model
    heads: Mapping[str, Path]  # by drafter; those that are not there ship with the model
    dtype: str
    asks: Sequence[JsonAsk]
    seed: int
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
            predicted = predictions(self.folder, self._right, self.seed)
            async with nodes_killed(server, random.Random(self.seed), outcome):
                await ask_all(server.grpc, self.asks, self._right, grid.asked, outcome, predicted)
        return outcome
