"""The first token belongs to the prefill node, the rest to the decode node: what may end there."""

from __future__ import annotations

import asyncio

import pytest

from paceline.v1 import common_pb2
from tests.fakes.nodes import cluster, sequence_request
from tests.fakes.runner import expected_output


@pytest.mark.parametrize("num_prompt", [1, 8, 21])
async def test_a_stop_token_that_comes_first_ends_the_request(num_prompt: int) -> None:
    """sglang #12151, sglang #7147, TensorRT-LLM #16691: the end of sequence (to a node one more stop token) comes
    first. It is told once, nothing is decoded after it, and no draft row crosses."""
    async with cluster() as nodes:
        free = sequence_request(num_prompt=num_prompt, max_tokens=20)
        stop = expected_output(free)[0]
        request = sequence_request(prompt=free.prompt_token_ids, max_tokens=20, stop_token_ids=(stop,))
        outcome = await nodes.generate(request)
        assert outcome.output == [stop]
        assert outcome.first_token is not None
        assert outcome.first_token.finish_reason == outcome.finish_reason == common_pb2.FINISH_REASON_STOP
        assert nodes.decode_runner.batch_sizes == []
        assert outcome.handed_off is not None
        assert outcome.handed_off.bytes.draft_kv == outcome.handed_off.bytes.hidden == 0
        await nodes.wait_for_release()


async def test_one_token_requests_among_others() -> None:
    """dynamo #13442: ``max_tokens=1`` beside requests that go on; each gets its own tokens and its own reason."""
    async with cluster() as nodes:
        requests = [sequence_request(max_tokens=1 + 7 * (i % 2), seed=i) for i in range(8)]
        outcomes = await asyncio.gather(*(nodes.generate(request) for request in requests))
        assert [outcome.output for outcome in outcomes] == [expected_output(request) for request in requests]
        assert {outcome.finish_reason for outcome in outcomes} == {common_pb2.FINISH_REASON_LENGTH}
        assert sum(nodes.decode_runner.batch_sizes) == sum(len(outcome.rounds) for outcome in outcomes)
        await nodes.wait_for_release()


async def test_choices_of_one_request_are_handed_over_each_for_itself() -> None:
    """sglang #9224, sglang #40297, vllm #38900: with ``n > 1`` the samples shared one hand-off id and hung. Here each
    has a ticket of its own, though their prompt is the same."""
    async with cluster() as nodes:
        prompt = sequence_request(num_prompt=40).prompt_token_ids
        requests = [sequence_request(prompt=prompt, seed=i) for i in range(4)]
        outcomes = await asyncio.gather(*(nodes.generate(request) for request in requests))
        assert [outcome.output for outcome in outcomes] == [expected_output(request) for request in requests]
        assert len({outcome.reserved.ticket for outcome in outcomes if outcome.reserved is not None}) == 4
        await nodes.wait_for_release()
