"""What went wrong elsewhere with pages, and at the last step of a request, shown not to happen here."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import grpc.aio

from paceline.request import SequenceRequest
from tests.fakes.nodes import Cluster, cluster, node_config, sequence_request, wait_until
from tests.fakes.runner import expected_output


async def serves(nodes: Cluster, request: SequenceRequest) -> None:
    assert (await nodes.generate(request)).output == expected_output(request)


async def abandon(nodes: Cluster, request: SequenceRequest, after_s: float) -> None:
    """Both callers leave."""
    decode = nodes.open_decode(request)
    event = await anext(aiter(decode))
    prefill = nodes.open_prefill(request, event.reserved)
    await asyncio.sleep(after_s)
    prefill.cancel()
    decode.cancel()


async def test_an_abort_at_the_last_decode_step_strands_no_page() -> None:
    """vllm #29906, vllm #46283: the client leaves while the round that ends its request is being computed."""
    async with cluster() as nodes:
        for _ in range(5):
            request = sequence_request(max_tokens=2)  # the first token from prefill, the last from the only round
            nodes.decode_runner.gate.clear()
            decode = nodes.open_decode(request)
            event = await anext(aiter(decode))
            async for _event in nodes.open_prefill(request, event.reserved):
                pass
            await wait_until(lambda: nodes.decode.shell.load().running == 1, 5.0, "the last round")
            decode.cancel()
            await asyncio.sleep(0.02)  # the engine is held in its forward: it hears of the end after the step
            nodes.decode_runner.gate.set()
            await nodes.wait_for_release()
        await serves(nodes, sequence_request())


async def test_an_abort_at_the_last_prefill_step_strands_no_page() -> None:
    """vllm #29906: both callers leave while the chunk that gives the first token is being computed."""
    async with cluster() as nodes:
        for _ in range(5):
            request = sequence_request(num_prompt=6)  # one chunk
            nodes.prefill_runner.gate.clear()
            decode = nodes.open_decode(request)
            event = await anext(aiter(decode))
            prefill = nodes.open_prefill(request, event.reserved)
            reading = asyncio.ensure_future(anext(aiter(prefill)))
            await wait_until(lambda: nodes.prefill.shell.status().held == 1, 5.0, "the only chunk")
            prefill.cancel()
            decode.cancel()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                await reading
            nodes.prefill_runner.gate.set()
            await nodes.wait_for_release()
        await serves(nodes, sequence_request())


async def test_a_request_that_needs_the_whole_pool_is_served() -> None:
    """sglang #26399: verification must not hang when no page is left. Its draft slots are reserved with the rest."""
    config = node_config(page_size=8, kv_cache_tokens=64, prefix_cache=False)
    async with cluster(decode_config=config) as nodes:
        slots = nodes.decode_runner.spec_slots
        request = sequence_request(num_prompt=64 - 20 - slots, max_tokens=20)
        reserved: list[int] = []
        serving = asyncio.create_task(serves(nodes, request))
        while not serving.done():
            reserved.append(nodes.decode.shell.load().free_pages)
            await asyncio.sleep(0.001)
        await serving
        assert min(reserved) == 0
        await nodes.wait_for_release()


async def test_text_stays_right_over_hundreds_of_requests() -> None:
    """sglang #23020: quality fell after some 100 requests. Every text is compared, a third of the clients leave."""
    rng = random.Random(23020)
    async with cluster() as nodes:
        limit = asyncio.Semaphore(6)
        outcomes: list[str] = []

        async def one(number: int) -> None:
            request = sequence_request(num_prompt=rng.randint(1, 60), max_tokens=rng.randint(1, 12), seed=number)
            async with limit:
                if number % 3:
                    await serves(nodes, request)
                else:
                    await abandon(nodes, request, rng.random() * 0.02)
                outcomes.append("right" if number % 3 else "left")

        await asyncio.gather(*(one(number) for number in range(240)))
        assert (outcomes.count("right"), outcomes.count("left")) == (160, 80)
        await nodes.wait_for_release()
