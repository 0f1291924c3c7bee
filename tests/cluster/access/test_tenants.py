"""Tenants of keys on real nodes, and the parts as a deployment puts them together."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import grpc.aio
import httpx
import pytest

from cluster.deployment import Deployment
from cluster.state.published import Served
from cluster.state.registry_types import Registry
from cluster.supervision import Supervision
from paceline.client import AsyncClient
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable
from paceline.v1 import admin_pb2, admin_pb2_grpc
from tests.fakes.redis_servers import Embedded
from tests.support.api_keys import Keys, write_keys
from tests.support.byte_text import VOCAB, ByteTokenizer
from tests.support.scripted_nodes import MAX_MODEL_LEN, FakeRegistry
from tests.support.tiny_http import MODEL, served

GRACE_S = 6.0
SOON_S = 9.0  # three times what is asked for, beside other tests: beyond the time for which requests wait for a node


async def test_no_tenant_learns_what_another_has_cached(tmp_path: Path) -> None:
    """The whole prompt is guessed, and so is every word of the other tenant's request. Mutant: a salt of the body's
    alone."""
    keys = write_keys(tmp_path / "keys.yaml")
    prompt = {"prompt": "the quick brown fox jumps over the lazy dog " * 4, "max_tokens": 2, "seed": 1}

    async def cached(client: httpx.AsyncClient, name: str, **more: Any) -> int:
        answer = await client.post("/v1/completions", json=prompt | more, headers=keys.header(name))
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    async with served(tmp_path, access=keys.access(MODEL)) as made, httpx.AsyncClient(base_url=made.url) as client:
        assert await cached(client, "acme") == 0
        assert await cached(client, "acme") > 0
        assert await cached(client, "other") == 0
        assert await cached(client, "slow", cache_salt="acme") == 0
        assert await cached(client, "acme", cache_salt="mine") == 0
        assert await cached(client, "acme", cache_salt="mine") > 0


class _Lease:
    def serves_operators(self, address: str) -> None:
        """Nobody asks where."""


class _Changes:
    async def switch(self, node_id: str, role: str, timeout_s: float) -> Any:
        raise KeyError(node_id)


async def test_a_deployment_asks_for_keys_at_all_its_doors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it opens its front door, without nodes. Mutant: a door that is not given the keys."""
    keys: Keys = write_keys(tmp_path / "keys.yaml")
    redis = Embedded()
    free = dict.fromkeys(("grpc", "http", "admin"), "127.0.0.1:0")
    options = {"model": "tiny", "drafter": "none", "api_keys": str(keys.path)} | free
    made: Any = Deployment(ServeConfig.model_validate(options))
    front = made.front
    front.directory, front.registry = FakeRegistry(), Registry(redis.url, 2.0)
    front._tokenizer, front._folder = ByteTokenizer(), None
    try:
        await front.open(Served(MAX_MODEL_LEN, VOCAB, True))
        nodes: Any = Supervision(front, made._secret, made._parts, cast(Any, _Lease()), made.config)
        nodes.changes = _Changes()
        await nodes.open_admin()
        async with httpx.AsyncClient(base_url=f"http://{front.http_address}") as client:
            for name, status in (("", 401), ("slow", 200), ("slow", 200), ("slow", 429)):
                assert (await client.get("/v1/models", headers=keys.header(name))).status_code == status
            assert (await client.get("/metrics")).status_code == 401
            assert (await client.get("/metrics", headers=keys.header("metrics"))).status_code == 200
        async with AsyncClient(front.grpc_address, api_key=keys.secrets["acme"]) as sdk:
            assert (await sdk.model_info()).model == "tiny"
        async with grpc.aio.insecure_channel(nodes.admin_address) as channel:
            stub, request = admin_pb2_grpc.AdminStub(channel), admin_pb2.SetRoleRequest(node_id="n", role="decode")
            for name, code in (("acme", "PERMISSION_DENIED"), ("operator", "UNKNOWN")):
                call = stub.SetRole(request, metadata=tuple(keys.header(name).items()))
                assert (await call.code()).name == code
    finally:
        await made.stop(0.0)
        redis.close()
    told = [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]
    assert told[-3:] == [
        "peer=127.0.0.1 key=acme act='/paceline.v1.Admin/SetRole' "
        "outcome=\"refused: the API key lacks the scope 'operator'\"",
        "peer=127.0.0.1 key=operator act='/paceline.v1.Admin/SetRole' outcome='allowed'",
        "peer=127.0.0.1 key=- act='nodes role n decode' outcome=\"failed: KeyError('n')\"",
    ]


async def _told(client: httpx.AsyncClient, url: str) -> str:
    """What a request that cannot be served is told soon: 503, and when to come back. Empty where nobody listens any
    more."""
    began = time.monotonic()
    try:
        reply = await client.post(url, json={"prompt": "hi"})
    except httpx.TransportError:
        return ""
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert time.monotonic() - began < SOON_S
    return reply.text


async def test_a_front_door_that_drains_takes_nothing_new_and_ends_what_runs() -> None:
    """Mutants: HTTP goes on while gRPC drains; new requests are taken until the grace is over; both graces, one after
    the other; a request waits for a node longer than it was told to, or for a router that stops."""
    redis = Embedded()
    free = dict.fromkeys(("grpc", "http"), "127.0.0.1:0")
    asked = {"model": "tiny", "drafter": "none", "queue_timeout_s": 0.2}
    made: Any = Deployment(ServeConfig.model_validate(asked | free))
    front = made.front
    front.directory, front.registry = FakeRegistry(), Registry(redis.url, 2.0)
    front._tokenizer, front._folder = ByteTokenizer(), None
    try:
        await front.open(Served(MAX_MODEL_LEN, VOCAB, True))
        place = front.router._admission.enter(1)  # a request that runs
        url = f"http://{front.http_address}/v1/completions"
        async with httpx.AsyncClient() as client, AsyncClient(front.grpc_address, retries=0) as sdk:
            assert "no decode node is alive" in await _told(client, url)
            began = time.monotonic()
            ending = asyncio.create_task(made.stop(GRACE_S))
            with pytest.raises(NodeUnavailable, match="takes no new requests"):
                await sdk.generate("hi")
            while told := await _told(client, url):
                assert "takes no new requests" in told
            assert not ending.done()
            front.router._admission.leave(place)
            await ending
        assert time.monotonic() - began < GRACE_S
    finally:
        await made.stop(0.0)
        redis.close()
