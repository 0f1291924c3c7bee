"""What a deployment cannot draft is refused by name, on gRPC and HTTP alike."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.frontdoor.http import create_app
from cluster.frontdoor.service import serve_grpc
from cluster.routing.metrics import Metrics
from paceline.client import AsyncClient
from paceline.errors import InvalidRequest
from tests.support.http_app import COMPLETIONS
from tests.support.scripted_nodes import Fleet, fleet

CHAIN: dict[str, Any] = {"drafter": "ngram", "num_draft_tokens": 4}
STATIC = {**CHAIN, "tree": "static", "tree_width": 3}
DYNAMIC = {**CHAIN, "tree": "dynamic", "tree_width": 3}

TOO_MUCH = [
    (CHAIN, {"num_draft_tokens": 5}, "num_draft_tokens", "at most 4"),
    (CHAIN, {"tree": "static"}, "tree", "must be chain in"),
    (CHAIN, {"tree_width": 2}, "tree_width", "at most 1 for a chain"),
    (STATIC, {"tree": "dynamic"}, "tree", "must be chain or static in"),
    (STATIC, {"tree_width": 4}, "tree_width", "at most 3 for a static"),
    (DYNAMIC, {"tree": "chain", "tree_width": 2}, "tree_width", "at most 1 for a chain"),
    (DYNAMIC, {"num_draft_tokens": 2**31 - 1}, "num_draft_tokens", "at most 4"),
    ({**CHAIN, "drafter": "none"}, {"num_draft_tokens": 1}, "num_draft_tokens", "must be 0"),
]
ALL_THAT_IS_GIVEN = [
    (CHAIN, {"num_draft_tokens": 4, "tree": "chain", "tree_width": 1}),
    (STATIC, {"num_draft_tokens": 0, "tree": "static", "tree_width": 3}),
    (DYNAMIC, {"num_draft_tokens": 4, "tree": "static", "tree_width": 3}),
    ({**CHAIN, "drafter": "none"}, {"num_draft_tokens": 0}),
]


async def by_grpc(nodes: Fleet, asked: dict[str, Any]) -> None:
    server = await serve_grpc(nodes.router, "127.0.0.1:0")
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.generate("hello", max_tokens=2, **asked)
    finally:
        await server.stop(0)


async def by_http(nodes: Fleet, asked: dict[str, Any]) -> None:
    transport = httpx.ASGITransport(create_app(nodes.router, Metrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        body = {"prompt": "hello", "max_tokens": 2, "speculation": asked}
        response = await client.post(COMPLETIONS, json=body)
    if response.status_code != 200:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "invalid_value")
        raise InvalidRequest(error["param"], error["message"].removeprefix(f"{error['param']}: "))


SURFACES = [by_grpc, by_http]


@pytest.mark.parametrize("ask", SURFACES)
@pytest.mark.parametrize(("deployment", "asked", "field", "says"), TOO_MUCH)
async def test_more_than_the_deployment_drafts(
    ask: Any, deployment: dict[str, Any], asked: dict[str, Any], field: str, says: str
) -> None:
    async with fleet(**deployment) as nodes:
        with pytest.raises(InvalidRequest) as refused:
            await ask(nodes, asked)
        assert refused.value.field == f"speculation.{field}"
        assert says in refused.value.message
        assert f"got {asked[field]!r}" in refused.value.message
        assert [node.sequences for node in nodes.nodes.values()] == [[], []]


@pytest.mark.parametrize("ask", SURFACES)
@pytest.mark.parametrize(("deployment", "asked"), ALL_THAT_IS_GIVEN)
async def test_all_that_the_deployment_drafts(ask: Any, deployment: dict[str, Any], asked: dict[str, Any]) -> None:
    async with fleet(**deployment) as nodes:
        await ask(nodes, asked)
        (sequence,) = nodes.nodes["decode-0"].sequences
        assert {name: getattr(sequence.speculation, name) for name in asked} == asked
