"""A State that a prefill node of ours never sends: its request ends with one error, and nothing stays held."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from decode_node.engine.handoffs import Handoffs
from paceline.v1 import handoff_pb2, node_pb2
from prefill_node.feeder import RowFeeder
from tests.fakes.nodes import Cluster, cluster, sequence_request
from tests.fakes.runner import expected_output

Change = Callable[[handoff_pb2.State], None]


def _finish_reason(state: handoff_pb2.State) -> None:
    state.ParseFromString(state.SerializeToString() + b"\x18\x09")  # enum 9


def _proposal_id(state: handoff_pb2.State) -> None:
    state.proposal_ids[0] = -1


def _large_proposal_id(state: handoff_pb2.State) -> None:
    state.proposal_ids[-1] = 2**31 - 1


def _probability(state: handoff_pb2.State) -> None:
    state.proposal_probs[0] = math.nan


def _shape(state: handoff_pb2.State) -> None:
    state.proposal_depth = 2**32 - 1


def _first_token(state: handoff_pb2.State) -> None:
    state.first_token_id = -1


CHANGES = (_finish_reason, _proposal_id, _large_proposal_id, _probability, _shape, _first_token)


async def fails_once(nodes: Cluster) -> str:
    """One request; the details of the error that its Decode call ends with."""
    request = sequence_request()
    decode = nodes.open_decode(request)
    reserved = (await anext(aiter(decode))).reserved
    prefill = nodes.open_prefill(request, reserved)

    async def follow(call: grpc.aio.UnaryStreamCall[node_pb2.DecodeRequest, node_pb2.DecodeEvent]) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in call:
                pass
        return failed.value.details() or ""

    async with asyncio.timeout(5):
        details, _ = await asyncio.gather(follow(decode), follow(prefill))
    await nodes.wait_for_release()
    again = sequence_request()
    assert (await nodes.generate(again)).output == expected_output(again)
    return details


@pytest.mark.parametrize("change", CHANGES)
async def test_it_ends_its_request_and_holds_nothing(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a range check of `decode_node/sink.py` left out."""
    send = RowFeeder.state
    changed: list[str] = []

    def state(feeder: RowFeeder, ticket: str, message: handoff_pb2.State, hidden: object) -> None:
        if not changed:
            change(message)
            changed.append(ticket)
        send(feeder, ticket, message, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(RowFeeder, "state", state)
    async with cluster() as nodes:
        assert "taking over failed" in await fails_once(nodes)


async def test_a_posted_call_that_raises_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: `EngineLoop.post` without ``failed``."""
    ready = Handoffs.ready
    failed: list[str] = []

    def raise_once(handoffs: Handoffs, ticket: str, state: handoff_pb2.State, draft: object) -> None:
        if not failed:
            failed.append(ticket)
            raise KeyError(9)
        ready(handoffs, ticket, state, draft)  # type: ignore[arg-type]

    monkeypatch.setattr(Handoffs, "ready", raise_once)
    async with cluster() as nodes:
        request = sequence_request()
        decode = nodes.open_decode(request)
        reserved = (await anext(aiter(decode))).reserved
        prefill = nodes.open_prefill(request, reserved)
        async with asyncio.timeout(5):
            assert [event async for event in prefill][-1].HasField("handed_off")
            with pytest.raises(grpc.aio.AioRpcError, match="KeyError"):
                async for _ in decode:
                    pass
        await nodes.wait_for_release()
