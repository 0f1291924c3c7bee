"""The HTTP application against a scripted router, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.frontdoor.http import create_app
from cluster.routing.metrics import Metrics
from tests.support.fake_router import FakeRouter


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client(router: FakeRouter, metrics: Metrics) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(router, metrics))
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        yield client
