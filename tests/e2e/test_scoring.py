"""Multiple-choice tasks as lm-eval's ``local-completions`` runs them, over HTTP and real nodes with a tiny model: its
log-likelihoods and greedy checks against transformers' own; and the same numbers apart and together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
import torch

from cluster.contract.generation import GenerationRequest
from cluster.frontdoor.http import create_app
from cluster.frontdoor.service import serve_grpc
from cluster.routing.router import Router
from cluster.state.registry_types import NodeRecord
from paceline.assembly.build import build_runner
from paceline.client import AsyncClient
from paceline.config import NodeConfig, ServeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest, PacelineError
from paceline.request import SamplingParams, SequenceRequest, TokenLogprobs
from paceline.rpc.wire_errors import error_from_rpc
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import node_pb2
from paceline.wire import PROMPT_LOGPROBS_A_MESSAGE, logprobs_from_proto, sequence_to_proto
from tests.support.needs import needs_kernels
from tests.support.node_pair import Pair, pair
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.tiny_model import tiny_request

MAX_MODEL_LEN = 1024
CONTEXTS = [[(31 * i * (k + 1) + 7 * k) % CHAT_VOCAB for i in range(1, 4 + 9 * k)] for k in range(5)]
CONTINUATIONS = [[5, 9, 100], [70], [41, 41, 41, 3, 200, 31], [250, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(folder: Path, **options: Any) -> NodeConfig:
    return NodeConfig(
        model=str(folder), dtype="fp32", drafter="ngram", kv_cache_tokens=4096, prefill_chunk_tokens=48, **options
    )


@dataclass
class Registry:
    """The nodes of a pair, but for those that are gone."""

    pair: Pair
    gone: set[str] = field(default_factory=set)

    def nodes(self) -> list[NodeRecord]:
        infos = self.pair.prefill_node.shell.load(), self.pair.decode_node.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages)
            for i in infos
            if i.role not in self.gone
        ]


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[tuple[Pair, Registry, Router]]:
    config = config_of(folder, **options)
    async with pair(config, build_runner(config), build_runner(config)) as nodes:
        registry, tokenizer = Registry(nodes), Tokenizer.from_folder(folder)
        router = Router(registry, tokenizer, ServeConfig(model=str(folder)), "tiny", MAX_MODEL_LEN, CHAT_VOCAB)
        try:
            yield nodes, registry, router
        finally:
            await router.close()
            await nodes.all_released()


@asynccontextmanager
async def over_http(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(router, router.metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline", timeout=60) as client:
        yield client


# -- as lm-eval does -----------------------------------------------------------------------------------------------


async def loglikelihoods(
    client: httpx.AsyncClient, pairs: list[tuple[list[int], list[int]]], max_tokens: int
) -> list[tuple[float, bool]]:
    """One request for all: the sum over each continuation, and whether each of its tokens is the likeliest one."""
    body = {
        "model": "tiny",
        "prompt": [context + continuation for context, continuation in pairs],
        **{"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True},
    }
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = []
    for choice, (context, _) in zip(response.json()["choices"], pairs, strict=True):
        part = slice(len(context), -max_tokens or None)
        values, best = (choice["logprobs"][name][part] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, best, strict=True))))
    return found


def by_transformers(oracle: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.inference_mode():
        logits = oracle(torch.tensor([context + continuation])).logits[0].double()
    rows = torch.log_softmax(logits, dim=1)[len(context) - 1 : -1]
    return float(rows[range(len(continuation)), continuation].sum()), rows.argmax(dim=1).tolist() == continuation


def greedy(oracle: Any, context: list[int], count: int) -> list[int]:
    tokens = list(context)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("gone", ["", "prefill"])
async def test_loglikelihoods_and_greedy_checks(folder: Path, oracle: Any, max_tokens: int, gone: str) -> None:
    pairs = [(context, continuation) for context in CONTEXTS for continuation in CONTINUATIONS]
    pairs += [(context, greedy(oracle, context, 3)) for context in CONTEXTS]
    expected = [by_transformers(oracle, *one) for one in pairs]
    assert {is_greedy for _, is_greedy in expected} == {False, True}
    async with served(folder) as (_, registry, router), over_http(router) as client:
        registry.gone = {gone}
        for _ in range(2):  # the second time the prompts are in the prefix cache
            got = await loglikelihoods(client, pairs, max_tokens)
            assert [value for value, _ in got] == pytest.approx([value for value, _ in expected], abs=1e-3)
            assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in expected]
        alone = [await loglikelihoods(client, [one], max_tokens) for one in pairs[:6]]
        assert [one for (one,) in alone] == got[:6]  # to the bit, however prompts are grouped


# -- apart and together --------------------------------------------------------------------------------------------


def request_of(length: int, max_tokens: int, index: int = 0) -> SequenceRequest:
    tokens = [(13 * i * i + 5 * i + index) % CHAT_VOCAB for i in range(length)]
    return tiny_request(tokens, index=index, max_tokens=max_tokens, prompt_logprobs=2)


def together(runner: ModelRunner, request: SequenceRequest) -> list[TokenLogprobs]:
    (done,) = ColocatedEngine(runner).generate([request])
    return [TokenLogprobs(*_float32(entry)) for entry in done.prompt_logprobs]


def _float32(entry: TokenLogprobs) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """As it crosses the wire."""
    first, *rest = torch.tensor([entry.logprob, *entry.top_logprobs], dtype=torch.float32).tolist()
    return first, entry.top_ids, tuple(rest)


@needs_kernels
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
async def test_the_same_bits_over_the_sdk_whoever_computes(folder: Path, max_tokens: int) -> None:
    request = request_of(300, max_tokens or 1)
    expected = tuple(together(build_runner(config_of(folder)), request))
    async with served(folder) as (nodes, registry, router):
        server = await serve_grpc(router, "127.0.0.1:0")
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            options: Any = {"max_tokens": max_tokens, "seed": 17, "temperature": 0.0}
            prompt = list(request.prompt_token_ids)
            plain = await client.generate(prompt, **options)
            for gone in ("", "", "prefill", "prefill"):  # from nothing and from the caches of both nodes
                registry.gone = {gone}
                done = await client.generate(prompt, prompt_logprobs=2, **options)
                assert done.choices[0].prompt_logprobs == expected
                assert done.token_ids == plain.token_ids
                assert done.completion.usage.completion_tokens == max_tokens
                async with client.stream(prompt, prompt_logprobs=2, **options) as stream:
                    parts = [chunk async for chunk in stream]
                assert tuple(entry for part in parts for entry in part.prompt_logprobs) == expected
                assert max(len(part.prompt_logprobs) for part in parts) <= PROMPT_LOGPROBS_A_MESSAGE
            assert nodes.decode.prefix is not None
        await server.stop(0)


async def test_a_decode_node_that_has_the_prompt_gets_no_rows_again(folder: Path) -> None:
    """The prefill node computes all of it, the hand-off is as short as ever."""
    async with served(folder) as (nodes, _, router):
        server = await serve_grpc(router, "127.0.0.1:0")
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            prompt = list(request_of(200, 5).prompt_token_ids)
            first = await client.generate(prompt, max_tokens=5, seed=1, prompt_logprobs=0)
            again = await client.generate(prompt, max_tokens=5, seed=1, prompt_logprobs=0)
            assert again.completion.usage.cached_tokens == 0  # of the node that computed it
            assert again.completion.handoff.target_kv < first.completion.handoff.target_kv / 4
            assert again.choices[0].prompt_logprobs == first.choices[0].prompt_logprobs
            alone = await client.generate(prompt, max_tokens=1, seed=1, prompt_logprobs=0)
            assert alone.choices[0].prompt_logprobs == first.choices[0].prompt_logprobs
            assert alone.completion.handoff.target_kv == 0
            assert alone.token_ids == first.token_ids[:1]
        await server.stop(0)
        await nodes.all_released()


# -- the nodes -----------------------------------------------------------------------------------------------------


async def prefilled(nodes: Pair, request: SequenceRequest, **fields: Any) -> list[node_pb2.PrefillEvent]:
    message = node_pb2.PrefillRequest(sequence=sequence_to_proto(request), **fields)
    return [event async for event in nodes.prefill_stub.Prefill(message, timeout=60)]


async def test_messages_of_a_prompt_are_bounded_and_in_order(folder: Path) -> None:
    async with served(folder, prefix_cache=False) as (nodes, _, _):
        request = request_of(700, 1)
        events = await prefilled(
            nodes, replace(request, params=replace(request.params, prompt_logprobs=20)), alone=True
        )
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[-2:] == ["first_token", "handed_off"]
        assert set(kinds[:-2]) == {"prompt_logprobs"}
        told = [event.prompt_logprobs for event in events[:-2]]
        assert [message.first_position for message in told] == [1, *range(49, 700, 48)]  # a message a chunk
        assert max(message.ByteSize() for message in told) < 210 * PROMPT_LOGPROBS_A_MESSAGE
        assert sum(len(message.logprobs) for message in told) == 699
        assert len(logprobs_from_proto(told[0].logprobs[0]).top_ids) == 20
        await nodes.all_released()


async def test_a_stream_goes_on_while_a_long_prompt_is_told_of(folder: Path) -> None:
    """On one decode node that computes the prompt itself: a round between two chunks."""
    async with served(folder) as (_, registry, router):
        registry.gone = {"prefill"}
        order: list[str] = []

        async def run(prompt: tuple[int, ...], params: SamplingParams) -> None:
            request = GenerationRequest(prompt, replace(params, ignore_eos=True), params.max_tokens)
            async for chunk in router.generate(request):
                order.extend(["prompt"] if chunk.prompt_logprobs else ["token"] * len(chunk.token_ids))

        other = asyncio.create_task(run((5, 6, 7), SamplingParams(seed=1, max_tokens=600)))
        while "token" not in order:
            await asyncio.sleep(0.001)
        await run(request_of(1000, 1).prompt_token_ids, SamplingParams(seed=1, max_tokens=0, prompt_logprobs=1))
        told = [i for i, kind in enumerate(order) if kind == "prompt"]
        assert len(told) == -(-1000 // 48)
        assert order[told[0] : told[-1]].count("token") >= 10
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)


async def test_what_nodes_refuse(folder: Path) -> None:
    async with served(folder) as (nodes, _, _):
        request = request_of(5, 1)

        async def refused(params: Any, **fields: Any) -> PacelineError:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await prefilled(nodes, replace(request, params=replace(request.params, **params)), **fields)
            return error_from_rpc(caught.value, "prefill-0")

        for params, fields, name in (
            ({"max_tokens": 0}, {"alone": True}, "max_tokens"),
            ({"prompt_logprobs": 21}, {"alone": True}, "prompt_logprobs"),
            ({}, {}, "ticket"),
        ):
            error = await refused(params, **fields)
            assert isinstance(error, InvalidRequest)
            assert error.field.endswith(name)


async def test_a_caller_that_leaves_in_the_midst(folder: Path) -> None:
    async with served(folder) as (nodes, _, _):
        message = node_pb2.PrefillRequest(sequence=sequence_to_proto(request_of(900, 1)), alone=True)
        call = nodes.prefill_stub.Prefill(message, timeout=60)
        event = await anext(aiter(call))
        assert event.HasField("prompt_logprobs")
        call.cancel()
        await nodes.all_released()
