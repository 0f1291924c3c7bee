"""The router in front of real nodes (fake models): what it asks is what they understand."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.contract.generation import GenerationRequest
from cluster.routing.router import Router
from cluster.state.registry_types import NodeRecord
from paceline.config import ServeConfig
from paceline.request import FinishReason, SamplingParams, derive_seed
from tests.fakes.nodes import Cluster, cluster
from tests.fakes.runner import VOCAB, next_token
from tests.support.byte_text import ByteTokenizer

PROMPT = tuple(range(100, 121))


@pytest.fixture(autouse=True)
def numbers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-off's numbers, for longer than any thread pauses: they are compared."""
    monkeypatch.setattr("cluster.routing.attempt.SETTLE_S", 30.0)


@dataclass
class Registry:
    """Both nodes, with the load they report."""

    nodes_: Cluster

    def nodes(self) -> list[NodeRecord]:
        infos = self.nodes_.prefill.shell.load(), self.nodes_.decode.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages) for i in infos
        ]


def router_for(nodes: Cluster, **options: Any) -> Router:
    config = ServeConfig(model="fake", request_timeout_s=20, **options)
    return Router(Registry(nodes), ByteTokenizer(), config, "fake", 512, VOCAB)


def expected(seed: int, count: int) -> tuple[int, ...]:
    return tuple(next_token(seed, len(PROMPT) + i) for i in range(count))


async def test_tokens_logprobs_numbers_and_pages() -> None:
    async with cluster() as nodes:
        router = router_for(nodes)
        params = SamplingParams(seed=5, n=3, top_logprobs=1, ignore_eos=True)
        done = await router.complete(GenerationRequest(PROMPT, params, 17))
        for i, choice in enumerate(done.choices):
            assert choice.token_ids == expected(derive_seed(5, i), 17)
            assert len(choice.logprobs) == 17
            completion = choice.completion
            assert completion.finish_reason is FinishReason.LENGTH
            assert (completion.nodes.prefill, completion.nodes.decode) == ("prefill-0", "decode-0")
            assert completion.handoff.target_kv > 0
            stats = completion.speculation
            assert stats.accepted_tokens + stats.rounds == 16
        await nodes.wait_for_release()
        await router.close()


@pytest.mark.parametrize("tokens", [0, 1, 4])
async def test_leaving_gives_the_pages_back(tokens: int) -> None:
    async with cluster() as nodes:
        router = router_for(nodes)
        nodes.decode_runner.step_s = 0.01
        if not tokens:
            nodes.prefill_runner.gate.clear()
        params = SamplingParams(seed=5, ignore_eos=True)
        async with aclosing(router.generate(GenerationRequest(PROMPT, params, 200))) as chunks:
            if not tokens:
                waiting = asyncio.ensure_future(anext(chunks))
                await asyncio.sleep(0.1)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
            for _ in range(tokens):
                await anext(chunks)
        nodes.prefill_runner.gate.set()
        await nodes.wait_for_release()
        assert router.inflight == 0
        await router.close()


async def test_a_forward_that_breaks_is_made_again_and_the_text_is_the_same() -> None:
    async with cluster() as nodes:
        router = router_for(nodes)
        nodes.decode_runner.gate.clear()  # until it is to break
        params = SamplingParams(seed=9, ignore_eos=True)
        async with aclosing(router.generate(GenerationRequest(PROMPT, params, 40))) as chunks:
            tokens: list[int] = []
            async for chunk in chunks:
                assert chunk.first_index == len(tokens)
                tokens += chunk.token_ids
                if len(chunk.token_ids) and len(tokens) < 8:
                    nodes.decode_runner.fail_next = True
                    nodes.decode_runner.gate.set()
        assert tuple(tokens) == expected(9, 40)
        assert 'paceline_retries_total{error="PacelineError"}' in router.metrics.render().decode()  # it did break
        await nodes.wait_for_release()
        await router.close()


async def test_prefill_gone_mid_way() -> None:
    async with cluster() as nodes:
        router = router_for(nodes)
        await nodes.prefill.stop(0.0)
        params = SamplingParams(seed=9, ignore_eos=True)
        done = await router.complete(GenerationRequest(PROMPT, params, 10))
        assert done.token_ids == expected(9, 10)
        assert done.completion.nodes.prefill == "decode-0"
        await router.close()


async def test_short_prompts_bypass_prefill() -> None:
    """TensorRT-LLM #10342: a hand-off of a few tokens costs more than computing them where they are needed."""
    params = SamplingParams(seed=5, ignore_eos=True)
    async with cluster() as nodes:
        router = router_for(nodes, bypass_tokens=len(PROMPT))
        (choice,) = (await router.complete(GenerationRequest(PROMPT, params, 9))).choices
        assert choice.token_ids == expected(derive_seed(5, 0), 9)
        assert (choice.completion.nodes.prefill, choice.completion.nodes.decode) == ("decode-0", "decode-0")
        assert choice.completion.handoff.target_kv == 0
        longer = (await router.complete(GenerationRequest((7, *PROMPT), params, 9))).choices[0].completion
        assert (longer.nodes.prefill, longer.handoff.target_kv > 0) == ("prefill-0", True)
        assert "paceline_bypassed_total 1.0" in router.metrics.render().decode()
        await nodes.wait_for_release()
        await router.close()


async def test_both_ways_are_measured() -> None:
    params = SamplingParams(seed=5, ignore_eos=True)
    async with cluster() as nodes:
        router = router_for(nodes, bypass_tokens=-1)
        ways = set()
        for _ in range(8):
            (choice,) = (await router.complete(GenerationRequest(PROMPT, params, 5))).choices
            assert choice.token_ids == expected(derive_seed(5, 0), 5)
            ways.add(choice.completion.nodes.prefill)
        assert ways == {"prefill-0", "decode-0"}
        await nodes.wait_for_release()
        await router.close()


async def test_rounds_are_told_together_and_nothing_else_changes() -> None:
    """Mutants: a router asks its nodes for nothing; log-probabilities or counts of all rounds but one are lost."""
    told = []
    async with cluster() as nodes:
        for interval_ms in (0.0, 200.0):
            router = router_for(nodes, stream_interval_ms=interval_ms)
            params = SamplingParams(seed=5, top_logprobs=1, ignore_eos=True)
            chunks = [chunk async for chunk in router.generate(GenerationRequest(PROMPT, params, 60))]
            told.append([chunk for chunk in chunks if chunk.token_ids])
            done = chunks[-1].completion
            assert done is not None
            assert tuple(token for chunk in chunks for token in chunk.token_ids) == expected(5, 60)
            assert sum(len(chunk.logprobs) for chunk in chunks) == 60
            assert len(done.speculation.accepted_per_round) == done.speculation.rounds
            assert done.speculation.accepted_tokens + done.speculation.rounds == 59
            assert [chunk.first_index for chunk in told[-1]][:2] == [0, 1]
            await nodes.wait_for_release()
            await router.close()
    apart, together = told
    assert [chunk.round is None for chunk in apart] == [True] + [False] * (len(apart) - 1)
    assert len(together) < len(apart)
