"""Serialized messages that are wrong in every way, sent to every public RPC of a running deployment."""

from __future__ import annotations

import asyncio
import contextlib
import random

import grpc
import grpc.aio
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.fuzz.campaign import ANSWER_S, FULL, SEED, Kept, campaign, seeded, too_few
from tests.fuzz.deployment import Deployment
from tests.fuzz.grpc_calls import RPCS, wrong
from tests.fuzz.grpc_sending import CHANNEL, Sender
from tests.fuzz.proto_mutations import noise

MESSAGES = FULL or 450


async def test_messages_that_are_wrong(served: Deployment, kept: Kept) -> None:
    """``campaign`` fails for each answer that none may get; here answers of every kind have to come."""
    async with grpc.aio.insecure_channel(served.grpc, options=CHANNEL) as channel:
        seen = await campaign("grpc", served, MESSAGES, seeded("grpc", wrong), Sender(channel).send, kept)
    assert too_few(seen, 0.1, "OK", "INVALID_ARGUMENT") == []
    assert too_few(seen, 0, "NOT_FOUND") == []


async def test_bytes_that_are_no_http2(served: Deployment) -> None:
    """Written to the port itself. What comes back is gRPC's own business. No process dies, and the good request has
    its answer."""
    host, _, port = served.grpc.rpartition(":")
    for number in range(max(FULL // 100, 20)):
        rng = random.Random(f"{SEED}/socket/{number}")
        reader, writer = await asyncio.open_connection(host, int(port))
        preface = rng.choice((b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST / HTTP/1.1\r\nhost: x\r\n\r\n"))
        writer.write(preface + noise(rng, b""))
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ANSWER_S):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    await asyncio.to_thread(served.alive)
    assert await asyncio.to_thread(served.good) == served.answer


async def test_every_public_rpc_is_sent_to(served: Deployment) -> None:
    """What the server itself lists, and nothing else."""
    with grpc.insecure_channel(served.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        services = [pool.FindServiceByName(name) for name in database.get_services()]
    listed = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert {rpc.path for rpc in RPCS} == listed
