"""Schemas and tools x every drafter x prefill and decode apart, with nodes that die in mid-stream: every answer is
valid, and that of one plain process.

The short run is in this process and kills nobody; ``--requests 2000`` starts deployments and kills their nodes.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cluster.verification.answers import Answer, parting
from cluster.verification.sides import Plain
from paceline.client import AsyncClient, choices_of
from paceline.grammar.compile import GrammarCompiler
from tests.multihost.small_model import write_model
from tests.soak.json_asks import JsonAsk, make_json_asks, public_schemas
from tests.support.folder_deployment import deployed
from tests.support.needs import needs_kernels
from tests.support.server import Server, serve
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels

SPEC = replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=4096)
SHORT_REQUESTS, SHORT_SEED = 12, 15
AT_ONCE = 8
KILL_EVERY_S = (2.0, 6.0)
PATIENCE_S = 240.0
COPYING = ("none", "ngram", "suffix", "trie", "lookahead")
# The deployment's own drafter and its options, and what requests name there.
DEPLOYMENTS: tuple[tuple[dict[str, object], tuple[str, ...]], ...] = (
    (
        {"drafter": "eagle3", "drafters": ",".join(COPYING), "num-draft-tokens": 4, "tree": "static", "tree-width": 2},
        ("eagle3", *COPYING),
    ),
    ({"drafter": "eagle", "num-draft-tokens": 3}, ("eagle",)),
    ({"drafter": "medusa", "num-draft-tokens": 3, "tree": "static", "tree-width": 2}, ("medusa",)),
)


@dataclass
class Outcome:
    """What came of the answers."""

    answers: Counter[str] = field(default_factory=Counter)  # by drafter
    judged: Counter[str] = field(default_factory=Counter)  # valid, or cut by the length
    invalid: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)  # by role
    running_when_killed: int = 0  # sequences on nodes that were killed

    def note(self, ask: JsonAsk, drafter: str, got: Sequence[Answer], right: Sequence[Answer]) -> None:
        """Compare one answer."""
        self.answers[drafter] += 1
        found = parting(got, right)
        if found is not None:
            self.different.append(f"{drafter}, {ask.asked.told}: {found}")
        word = ask.judge(got[0])
        if word in ("valid", "cut"):
            self.judged[word] += 1
        else:
            self.invalid.append(f"{drafter}, {ask.asked.told}: {word}")

    def figures(self, count: int, seconds: float) -> dict[str, Any]:
        """For a file of results."""
        return {
            "requests": count,
            "answers": sum(self.answers.values()),
            "by_drafter": dict(self.answers),
            "valid": self.judged["valid"],
            "cut_by_length": self.judged["cut"],
            "invalid": len(self.invalid),
            "different_from_plain": len(self.different),
            "kills": dict(self.kills),
            "sequences_on_killed_nodes": self.running_when_killed,
            "seconds": round(seconds, 1),
        }


async def plain_answers(folder: Path, address: str, asks: Sequence[JsonAsk]) -> list[list[Answer]]:
    """What one process without a drafter answers."""
    async with AsyncClient(address) as client:
        plain = Plain(folder, await client.model_info())
    await plain.load([ask.asked for ask in asks])
    return [await plain.answer(ask.asked, {}) for ask in asks]


async def one_answer(client: AsyncClient, ask: JsonAsk, drafter: str) -> list[Answer]:
    """A stream, put together."""
    options: Any = {**ask.asked.options, "drafter": drafter}
    stream = client.stream(ask.asked.prompt, timeout=PATIENCE_S, **options)
    return [Answer.of(choice) for choice in choices_of([chunk async for chunk in stream])]


async def ask_all(
    address: str, asks: Sequence[JsonAsk], right: Sequence[list[Answer]], drafters: Sequence[str], outcome: Outcome
) -> None:
    """Every request with every drafter."""
    turns = iter([(drafter, at) for at in range(len(asks)) for drafter in drafters])
    async with AsyncClient(address) as client:

        async def work() -> None:
            for drafter, at in turns:
                outcome.note(asks[at], drafter, await one_answer(client, asks[at], drafter), right[at])

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(work())


async def kill_nodes(server: Server, rng: random.Random, outcome: Outcome) -> None:
    """Now and then a node that works, by SIGKILL."""
    async with AsyncClient(server.grpc) as client:
        while True:
            await asyncio.sleep(rng.uniform(*KILL_EVERY_S))
            nodes = (await client.model_info()).nodes
            busy = [node for node in nodes if node.running] or list(nodes)
            if not busy:
                continue
            node = rng.choice(busy)
            port = int(node.address.rpartition(":")[2])
            if (process := await asyncio.to_thread(_listens, server, port)) is not None:
                process.kill()
                outcome.kills[node.role] += 1
                outcome.running_when_killed += node.running


def _listens(server: Server, port: int) -> psutil.Process | None:
    for process in server.processes():
        try:
            connections = process.net_connections()
        except psutil.Error:
            continue
        if any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in connections):
            return process
    return None


async def test_json_of_schemas_and_tools(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(1)
    count = request.config.getoption("requests", default=None)
    seed = request.config.getoption("seed", default=None) or SHORT_SEED
    outcome = Outcome()
    folder = write_model(tmp_path / "model", SPEC)
    if count is None:
        asks = make_json_asks(seed, SHORT_REQUESTS)
        async with deployed(folder, drafter="ngram", tree="static", tree_width=2) as address:
            await ask_all(address, asks, await plain_answers(folder, address, asks), ("ngram",), outcome)
    else:
        suite, results = (request.config.getoption(name, default=None) for name in ("suite", "results"))
        public = public_schemas(Path(suite), GrammarCompiler(folder, SPEC.vocab_size)) if suite else []
        asks, began = make_json_asks(seed, count, public), time.monotonic()
        await _long(tmp_path, folder, asks, seed, outcome)
        figures = {"seed": seed, "public_schemas": len(public), **outcome.figures(count, time.monotonic() - began)}
        print(f"\n{json.dumps(figures, indent=1)}")
        if results:
            Path(results).write_text(json.dumps(figures, indent=1) + "\n")
        assert outcome.kills
    assert outcome.invalid == []
    assert outcome.different == []
    assert outcome.judged["valid"] > outcome.judged["cut"]


async def _long(tmp_path: Path, folder: Path, asks: Sequence[JsonAsk], seed: int, outcome: Outcome) -> None:
    right: list[list[Answer]] = []
    for options, drafters in DEPLOYMENTS:
        heads = tmp_path / str(options["drafter"])
        write_tiny_head(heads, str(options["drafter"]), SPEC)
        given = {"model": folder, "drafter-path": heads, "dtype": "fp32", "prefill-nodes": 1, "decode-nodes": 2}
        given |= {"threads-per-node": 1, "kv-cache-tokens": 16384, "max-model-len": 4096, "request-timeout-s": 230}
        flags = [text for name, value in (given | options).items() for text in (f"--{name}", str(value))]
        with serve(*flags) as server:
            right = right or await plain_answers(folder, server.grpc, asks)
            killing = asyncio.create_task(kill_nodes(server, random.Random(seed), outcome))
            try:
                await ask_all(server.grpc, asks, right, drafters, outcome)
            finally:
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)
        print(f"\n{options['drafter']}: {sum(outcome.answers.values())} answers, {dict(outcome.kills)} kills so far")
