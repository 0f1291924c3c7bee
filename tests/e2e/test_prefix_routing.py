"""Conversations go back to the nodes that have them cached: four nodes of a tiny model, a router, a Redis that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.contract.generation import GenerationRequest
from cluster.nodes import host
from cluster.nodes.host import NodeHost
from cluster.routing.router import Router
from cluster.state.cache_events import CacheWatcher
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import Registry
from decode_node.node import DecodeNode
from paceline.config import NodeConfig, ServeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.request import SamplingParams, SequenceRequest, derive_seed
from paceline.results import Choice
from prefill_node.node import PrefillNode
from tests.fakes.redis_servers import Embedded
from tests.support.byte_text import ByteDetokenizer, ByteTokenizer
from tests.support.exactness import run
from tests.support.tiny_model import VOCAB, tiny_prefill_runner, tiny_runner

OPTIONS: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 2, "page_size": 4}
TTL_S = 2.0
ANSWER_TOKENS = 10
TENANT = "tenant"
Tokens = tuple[int, ...]


@dataclass
class Talk:
    """A conversation: every turn says all that was said, and something new."""

    said: Tokens
    nodes: set[tuple[str, str]] = field(default_factory=set)


@dataclass
class Deployment:
    """Two prefill and two decode nodes, each with its lease, and a router."""

    server: Embedded
    directory: NodeDirectory
    watcher: CacheWatcher
    router: Router
    hosts: list[NodeHost]

    async def turn(self, talk: Talk, tenant: str = TENANT) -> Choice:
        """Ask, check the text, and go on talking."""
        params = SamplingParams(seed=5, temperature=1.0, ignore_eos=True)
        done = await self.router.complete(GenerationRequest(talk.said, params, ANSWER_TOKENS, tenant=tenant))
        (choice,) = done.choices
        assert choice.token_ids == plain_answer(talk.said)
        talk.nodes.add((choice.completion.nodes.prefill, choice.completion.nodes.decode))
        talk.said += (*choice.token_ids, *range(20, 29))
        return choice

    async def settled(self) -> None:
        """Until every node is idle, by itself and as the router sees it, and the index has what each of them has
        cached: a node that is about to release its last request is about to cache it."""

        def same() -> bool:
            idle = not any(node.running or node.waiting for node in self.directory.nodes())
            for made in self.hosts:
                load = made._node.shell.load()
                if load.running or load.waiting or load.free_pages != load.total_pages:
                    return False
                held = self.watcher.index.get((made._node_id, made._generation))
                cache = made._node.shell.prefix_cache()
                if held is None or held.keys != set(cache._entries):  # type: ignore[union-attr]
                    return False
            return idle and len(self.directory.nodes()) == 4

        await until(same)

    def counted(self, what: str) -> float:
        """Sum over both roles."""
        families = text_string_to_metric_families(self.router.metrics.render().decode())
        return sum(s.value for f in families for s in f.samples if s.name == f"paceline_prefix_{what}_tokens_total")


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.02)


@cache
def plain_runner() -> ModelRunner:
    """One process, no drafts, no prefix cache."""
    return tiny_runner(drafter="none", prefix_cache=False)


def plain_answer(prompt: Tokens) -> Tokens:
    """What is to be said."""
    params = SamplingParams(seed=derive_seed(5, 0), temperature=1.0, max_tokens=ANSWER_TOKENS)
    return run(plain_runner(), [SequenceRequest("plain", prompt, params)])[0].token_ids


@pytest.fixture
def tiny_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(role: str, node_id: str, config: NodeConfig) -> host.Node:
        if role == "prefill":
            return PrefillNode(config, node_id, tiny_prefill_runner(**OPTIONS))
        return DecodeNode(config, node_id, tiny_runner(**OPTIONS))

    monkeypatch.setattr(host, "make_node", make)


@asynccontextmanager
async def deployment() -> AsyncIterator[Deployment]:
    server = Embedded()
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 16} | OPTIONS)
    names = [(role, f"{role}-{i}") for role in ("prefill", "decode") for i in range(2)]
    hosts = [NodeHost(role, node_id, 1, config, Registry(server.url, TTL_S)) for role, node_id in names]
    directory = NodeDirectory(server.url, TTL_S)
    watcher = CacheWatcher(server.url, directory.nodes, TTL_S)
    serve = ServeConfig.model_validate({"model": "tiny", "lease_ttl_s": TTL_S} | OPTIONS)
    router = Router(
        directory, ByteTokenizer(), serve, "tiny", 512, VOCAB, detokenizer=ByteDetokenizer, prefixes=watcher.index
    )
    try:
        for made in hosts:
            await asyncio.to_thread(made.start)
        await directory.start()
        await watcher.start()
        yield Deployment(server, directory, watcher, router, hosts)
    finally:
        await router.close()
        await watcher.close()
        await directory.close()
        for made in hosts:
            await asyncio.to_thread(made.stop, 0.0)
        server.close()


@pytest.mark.usefixtures("tiny_nodes")
async def test_conversations_stay_where_they_are_cached() -> None:
    async with deployment() as made:
        first, second = Talk(tuple(range(30, 71))), Talk(tuple(range(90, 131)))
        for talk in (first, second):
            await made.settled()
            assert (await made.turn(talk)).completion.usage.cached_tokens == 0
        # By turns alone the second one would now go where the first one is.
        for talk in (second, first, first, second):
            await made.settled()
            before = made.counted("hint"), made.counted("hit")
            choice = await made.turn(talk)
            assert choice.completion.usage.cached_tokens >= 36  # the prompt before this one, less its last page
            assert len(talk.nodes) == 1
            assert made.counted("hint") - before[0] == made.counted("hit") - before[1] > 72
        assert first.nodes.isdisjoint(second.nodes)
        trace = await made.router.trace(choice.completion.request_id)
        (attempt,) = [event for event in trace.events if event.name == "attempt"]
        assert attempt.attributes["prefill_hint_tokens"] == choice.completion.usage.cached_tokens

        stranger = Talk(first.said)
        await made.settled()
        assert (await made.turn(stranger, "another")).completion.usage.cached_tokens == 0

        made.server.kill()
        await until(lambda: not made.watcher.index.cached_tokens(made.directory.nodes(), first.said, TENANT))
        began, hints = time.monotonic(), made.counted("hint")
        await made.turn(Talk(tuple(range(140, 160))))  # nobody waits for Redis
        assert time.monotonic() - began < 30.0
        assert made.counted("hint") == hints
        made.server.start_again()
        for talk in (second, first):
            await made.settled()
            choice = await made.turn(talk)
            assert choice.completion.usage.cached_tokens >= 72
            assert len(talk.nodes) == 1
