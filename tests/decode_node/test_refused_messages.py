"""A decode node counts what it refuses for what it says, on its RPCs and on a link. Real gRPC and gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from torch import Tensor

from kv_transfer.transports.sealed import SealedTransport
from paceline.v1 import handoff_pb2
from prefill_node.control import ControlStream
from tests.fakes.nodes import Cluster, sequence_request
from tests.fakes.runner import expected_output
from tests.support.certificates import make_folder, secured

Message = handoff_pb2.HandoffMessage
TIMEOUT_S = 10.0


def announces_too_much(message: Message) -> list[Message]:
    message.chunk.num_bytes = 2**63
    return [message]


def outside(message: Message) -> list[Message]:
    message.chunk.first_token += 10_000
    return [message]


def of_no_kind(message: Message) -> list[Message]:
    return [Message(ticket=message.ticket), message]


def twice(message: Message) -> list[Message]:
    return [message, message]


LIES: dict[str, tuple[str, Callable[[Message], list[Message]]]] = {
    "a chunk that announces too much": ("chunk", announces_too_much),
    "rows that nobody asked for": ("chunk", outside),
    "a message of no kind": ("begin", of_no_kind),
    "a rendezvous told twice": ("rendezvous", twice),
}


async def counted(nodes: Cluster, number: int) -> None:
    """Until the node has refused so many, and it serves who means well."""
    async with asyncio.timeout(TIMEOUT_S):
        while nodes.decode.counts()["refused_messages"] < number:
            await asyncio.sleep(0.02)
    await nodes.wait_for_release()
    request = sequence_request()
    assert (await nodes.generate(request)).output == expected_output(request)
    assert nodes.decode.counts()["refused_messages"] == number
    await nodes.wait_for_release()


async def ask(nodes: Cluster) -> None:
    """A request, whatever becomes of it."""
    with suppress(grpc.aio.AioRpcError, AssertionError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_S / 2):
            await nodes.generate(sequence_request())


@pytest.mark.parametrize("lie", LIES)
async def test_what_a_prefill_node_says(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. Mutants: what ends a link is not counted; nor is what ends a hand-off alone."""
    kind, change = LIES[lie]
    post, told = ControlStream.post, False

    def lying(control: ControlStream, message: Message) -> None:
        nonlocal told
        if told or message.WhichOneof("body") != kind:
            return post(control, message)
        told = True
        for one in change(message):
            post(control, one)

    monkeypatch.setattr(ControlStream, "post", lying)
    async with secured(None) as nodes:
        await ask(nodes)
        assert told
        await counted(nodes, 1)


async def test_rows_that_the_peer_did_not_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: bytes that do not open are a link like any that breaks."""
    start_send, told = SealedTransport.start_send, False

    def lying(transport: SealedTransport, tensor: Tensor) -> Any:
        nonlocal told
        transport._sealed += not told
        told = True
        return start_send(transport, tensor)

    monkeypatch.setattr(SealedTransport, "start_send", lying)
    async with secured(make_folder(tmp_path / "a")) as nodes:
        await ask(nodes)
        assert told
        await counted(nodes, 1)


async def test_what_is_no_message_of_its_rpc() -> None:
    """It is counted by both nodes. Mutant: it is answered alone."""
    async with secured(None) as nodes:
        prefill = nodes.prefill.shell.load().address
        for address, service, node in (
            (nodes.decode_address, "DecodeNode", nodes.decode),
            (prefill, "PrefillNode", nodes.prefill),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                opened: Any = channel
                call = opened.unary_unary(f"/paceline.v1.{service}/Status")(
                    b"\xff" * 17, metadata=nodes.identity.metadata
                )
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert node.counts()["refused_messages"] == 1
