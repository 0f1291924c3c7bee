"""The two nodes together: what crosses, what comes back, who ends how."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS
from paceline.request import SpeculationParams
from paceline.v1 import common_pb2
from tests.fakes.nodes import cluster, node_config, sequence_request
from tests.fakes.runner import expected_output


async def test_whole_handoff_gives_the_expected_tokens_once() -> None:
    async with cluster() as nodes:
        request = sequence_request(num_prompt=21, max_tokens=9)
        outcome = await nodes.generate(request)
        assert outcome.output == expected_output(request)
        assert outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert sum(r.num_accepted + 1 for r in outcome.rounds) == 8  # the first token comes from prefill
        assert outcome.handed_off is not None
        sent = outcome.handed_off.bytes
        assert sent.target_kv == 21 * 2 * 16 * 4
        assert sent.draft_kv == 21 * 8 * 4
        assert sent.hidden == 8 * 4
        assert sent.meta > 0
        assert outcome.handed_off.exposed_s >= 0
        await nodes.wait_for_release()


@pytest.mark.parametrize(("prefill_mib", "decode_mib", "multiple"), [(32, 48, 8), (16, 8, 2), (0, 32, 1), (32, 0, 1)])
async def test_both_ends_of_a_link_agree_on_the_size_of_a_message(
    prefill_mib: int, decode_mib: int, multiple: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that offers nothing does not ask. Mutants: an end takes its own offer, or does not tell it; fewer
    messages may wait than there are buffers."""
    monkeypatch.setattr("prefill_node.links.offered_bytes", lambda *_: prefill_mib << 20)
    monkeypatch.setattr("decode_node.links.offered_bytes", lambda *_: decode_mib << 20)
    async with cluster() as nodes:
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)
        ((sending, _),) = nodes.prefill._links._links.values()
        (receiving,) = nodes.decode._links._links.values()
        assert receiving.receiver is not None
        assert sending._sender.multiple == receiving.receiver._intake._staging.multiple == multiple
        assert sending._sender._outbox._max_bytes >= NUM_BUFFERS * multiple * MESSAGE_BYTES
        assert sending._feeder._staging.take(1).numel() == multiple * MESSAGE_BYTES


async def test_first_token_can_end_the_request() -> None:
    async with cluster() as nodes:
        request = sequence_request(max_tokens=1)
        outcome = await nodes.generate(request)
        assert outcome.output == expected_output(request)
        assert outcome.first_token is not None
        assert outcome.first_token.finish_reason == outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert nodes.decode_runner.batch_sizes == []
        assert outcome.handed_off is not None
        assert outcome.handed_off.bytes.draft_kv == 0
        await nodes.wait_for_release()


async def test_concurrent_requests_share_one_link_and_one_batch() -> None:
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.02
        requests = [sequence_request(num_prompt=10 + 7 * i, max_tokens=30, seed=i) for i in range(4)]
        outcomes = await asyncio.gather(*(nodes.generate(request) for request in requests))
        assert [outcome.output for outcome in outcomes] == [expected_output(request) for request in requests]
        assert max(nodes.decode_runner.batch_sizes) > 1
        assert len(nodes.decode._links._links) == 1
        await nodes.wait_for_release()


async def test_second_request_sends_only_what_decode_lacks() -> None:
    async with cluster() as nodes:
        request = sequence_request(num_prompt=40, max_tokens=5)
        await nodes.generate(request)
        again = await nodes.generate(request)
        assert again.output == expected_output(request)
        assert again.reserved is not None
        assert again.reserved.cached_tokens == 32  # whole pages of 8 with one token of lookahead
        assert again.first_token is not None
        assert again.first_token.cached_tokens == 36
        assert again.handed_off is not None
        assert again.handed_off.bytes.target_kv == 8 * 2 * 16 * 4
        await nodes.wait_for_release()


async def test_rows_from_the_prefill_nodes_cache_cross_too() -> None:
    async with cluster(decode_config=node_config(prefix_cache=False)) as nodes:
        request = sequence_request(num_prompt=40, max_tokens=5)
        await nodes.generate(request)
        again = await nodes.generate(request)
        assert again.output == expected_output(request)
        assert again.handed_off is not None
        assert again.handed_off.bytes.target_kv == 40 * 2 * 16 * 4
        await nodes.wait_for_release()


async def test_resumed_request_continues_at_its_index() -> None:
    async with cluster() as nodes:
        whole = sequence_request(max_tokens=12)
        emitted = tuple(expected_output(whole)[:5])
        resumed = sequence_request(prompt=whole.prompt_token_ids, max_tokens=12, output_token_ids=emitted)
        outcome = await nodes.generate(resumed)
        assert min(outcome.tokens) == 5
        assert [*emitted, *outcome.output] == expected_output(whole)
        await nodes.wait_for_release()


async def test_local_prefill_needs_no_prefill_node() -> None:
    async with cluster() as nodes:
        request = sequence_request(num_prompt=40, max_tokens=9)
        outcome = await nodes.generate_locally(request)
        assert outcome.output == expected_output(request)
        assert outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert sum(r.num_accepted + 1 for r in outcome.rounds) == 8  # the first token comes without a round
        again = await nodes.generate_locally(request)
        assert again.output == expected_output(request)
        assert again.cached_tokens == 32
        await nodes.wait_for_release()


async def test_local_prefill_of_a_one_token_request() -> None:
    async with cluster() as nodes:
        request = sequence_request(max_tokens=1)
        outcome = await nodes.generate_locally(request)
        assert outcome.output == expected_output(request)
        assert outcome.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await nodes.wait_for_release()


async def test_stop_token_inside_a_round_ends_the_stream() -> None:
    async with cluster() as nodes:
        free = sequence_request(max_tokens=20)
        stop = expected_output(free)[6]
        request = sequence_request(prompt=free.prompt_token_ids, max_tokens=20, stop_token_ids=(stop,))
        outcome = await nodes.generate(request)
        assert outcome.output == expected_output(free)[:7]
        assert outcome.finish_reason == common_pb2.FINISH_REASON_STOP
        await nodes.wait_for_release()


async def test_pairing_mismatch_is_refused_with_both_fingerprints() -> None:
    async with cluster(prefill_weights="other") as nodes:
        request = sequence_request()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nodes.generate(request)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = refused.value.details() or ""
        assert "weights" in details
        assert "other" in details
        assert "w0" in details
        await nodes.wait_for_release()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ()}, "prompt_token_ids"),
        ({"prompt": (5000,)}, "prompt_token_ids"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_tokens": 3, "output_token_ids": (1, 2, 3)}, "output_token_ids"),
        ({"speculation": SpeculationParams(num_draft_tokens=3)}, "speculation.num_draft_tokens"),  # the node drafts 2
        ({"speculation": SpeculationParams(tree="static")}, "speculation.tree"),
    ],
)
async def test_bad_requests_name_the_field(changes: dict[str, Any], field: str) -> None:
    async with cluster() as nodes:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nodes.generate(sequence_request(**changes))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(f"{field}: ")
        await nodes.wait_for_release()
