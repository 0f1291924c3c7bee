"""What a decode node tells of the tokens that it made: those that a router was told, of this sequence alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from decode_node import made
from decode_node.made import MadeTokens
from paceline.request import MAX_N, SequenceRequest
from paceline.v1 import node_pb2
from paceline.wire import sequence_digest, sequence_to_proto
from tests.fakes.nodes import Cluster, cluster, sequence_request
from tests.fakes.runner import expected_output


async def recall(nodes: Cluster, *asked: SequenceRequest, num_tokens: int = 1000) -> list[list[int]]:
    names = [sequence_digest(sequence_to_proto(one)) for one in asked]
    sequences = [node_pb2.RecallSequence(digest=name, num_tokens=num_tokens) for name in names]
    answer = await nodes.decode_stub.Recall(node_pb2.RecallRequest(sequences=sequences))
    return [list(one.token_ids) for one in answer.made]


async def until(call: Any, count: int) -> int:
    """Read until so many tokens came; the index after the last."""
    async for event in call:
        if event.HasField("tokens") and (end := event.tokens.first_index + len(event.tokens.token_ids)) >= count:
            return int(end)
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("handed_over", [True, False])
async def test_while_it_runs_once_its_router_left_and_after_its_end(handed_over: bool) -> None:
    """Mutants: a stream is forgotten with its call; tokens of a router before this one are not among them."""
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.02
        request = sequence_request(max_tokens=40)
        right = expected_output(request)
        asked = replace(request, output_token_ids=tuple(right[:3]))
        call = nodes.open_decode(asked, local_prefill=not handed_over)
        if handed_over:
            reserved = (await anext(aiter(call))).reserved
            async for event in nodes.open_prefill(asked, reserved):
                if event.HasField("first_token"):
                    break
        told = await until(call, 10)
        (running,) = await recall(nodes, request)
        assert running == right[: len(running)]
        assert told <= len(running) <= 40
        call.cancel()
        await nodes.wait_for_release()
        left, first, other = await asyncio.gather(
            recall(nodes, request), recall(nodes, request, num_tokens=2), recall(nodes, sequence_request())
        )
        assert len(running) <= len(left[0]) < 40
        assert left[0] == right[: len(left[0])]
        assert (first, other) == ([right[:2]], [[]])
        await nodes.generate_locally(request)
        assert await recall(nodes, request) == [right]


async def test_only_the_same_sequence_has_them() -> None:
    """Any id, and any tokens that it begins with. Mutants: another seed, tenant or prompt gets these tokens; the next
    router, whose attempt has another id or more tokens, does not."""
    async with cluster() as nodes:
        request = sequence_request(max_tokens=8)
        right = expected_output(request)
        await nodes.generate_locally(request)
        same = [replace(request, request_id="again"), replace(request, output_token_ids=tuple(right[:4]))]
        assert await recall(nodes, *same) == [right, right]
        others = [
            replace(request, params=replace(request.params, seed=99)),
            replace(request, cache_salt="another"),
            replace(request, prompt_token_ids=(*request.prompt_token_ids, 1)),
        ]
        assert await recall(nodes, *others) == [[], [], []]


async def test_what_was_not_told_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails may have committed wrong tokens. Mutant: all that the sequence has is kept."""
    async with cluster() as nodes:
        request = sequence_request(max_tokens=40)
        call = nodes.open_decode(request, local_prefill=True)
        told = await until(call, 5)
        for streams in nodes.decode._made._running.values():
            for stream in streams:
                assert stream.seq is not None
                stream.seq.token_ids.extend([7] * 50)
        (found,) = await recall(nodes, request)
        assert told <= len(found) <= 40
        assert found == expected_output(request)[: len(found)]
        call.cancel()


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest give way, and the longest of equal sequences stays. Mutants: nothing is ever dropped; what replaces
    an entry is counted twice; a shorter attempt takes the place of a longer one."""
    monkeypatch.setattr(made, "_made_by", lambda stream: stream)
    kept, messages = MadeTokens(10), [node_pb2.SequenceRequest(cache_salt=str(i)) for i in range(4)]

    def note(which: int, count: int) -> None:
        stream: Any = [which] * count
        with kept.of(messages[which], stream):
            pass

    def lengths() -> list[int]:
        asked = [node_pb2.RecallSequence(digest=sequence_digest(one), num_tokens=99) for one in messages]
        return [len(one.token_ids) for one in kept.recall(node_pb2.RecallRequest(sequences=asked)).made]

    for which, count in ((0, 4), (1, 4), (0, 5), (0, 2)):
        note(which, count)
    assert lengths() == [5, 4, 0, 0]
    note(2, 2)
    assert lengths() == [5, 0, 2, 0]
    note(3, 11)
    assert lengths() == [0, 0, 0, 0]
    assert (kept._num_kept, kept._running) == (0, {})


async def test_a_request_for_too_many_is_refused() -> None:
    async with cluster() as nodes:
        asked = node_pb2.RecallRequest(sequences=[node_pb2.RecallSequence()] * (MAX_N + 1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await nodes.decode_stub.Recall(asked)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
