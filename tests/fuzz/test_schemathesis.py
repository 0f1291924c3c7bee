"""Schemathesis against the OpenAPI document of a running deployment: the requests that another's tool makes of it.

It takes a third of a second for each, so it has no part in the quick run.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.campaign import FULL, SEED, Kept, campaign
from tests.fuzz.deployment import Deployment
from tests.fuzz.http_cases import GENERATIONS, HttpCase, bounded, request
from tests.fuzz.http_sending import HttpSender

CASES = FULL // 10
_ALL = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.mark.skipif(not FULL, reason="slow: make fuzz-surface runs it")
async def test_requests_of_schemathesis(served: Deployment, kept: Kept) -> None:
    """``campaign`` fails for each answer that none may get."""
    document = httpx.get(f"http://{served.http}/openapi.json", timeout=10).json()
    cases = drawn(document, CASES)
    send = HttpSender(served.http, document).send
    await campaign("schemathesis", served, len(cases), cases.__getitem__, send, kept)


def drawn(document: dict[str, Any], count: int) -> list[HttpCase]:
    """``count`` cases, right and wrong, of all operations together."""
    import schemathesis  # heavy

    found: Any = schemathesis.openapi.from_dict(document).get_all_operations()
    operations = [result.ok() for result in found]
    cases: list[HttpCase] = []

    def take(case: Any) -> None:
        cases.append(_as_case(case))

    for operation in operations:
        generates = operation.path in GENERATIONS
        for mode in schemathesis.GenerationMode if generates else [schemathesis.GenerationMode.POSITIVE]:
            share = count * (22 if generates else 3) // 100
            draw: Any = given(operation.as_strategy(generation_mode=mode))(take)  # type: ignore[no-untyped-call]
            draw = seed(SEED)(settings(_ALL, max_examples=share)(draw))
            draw()
    return cases


def _as_case(case: Any) -> HttpCase:
    """The request that schemathesis would send, as bytes."""
    case.body = bounded(case.body)
    prepared = case.as_transport_kwargs(base_url="http://fuzz")
    body = prepared.get("data", b"") if "json" not in prepared else json.dumps(prepared["json"]).encode()
    data = body.encode() if isinstance(body, str) else body or b""
    path = prepared["url"].removeprefix("http://fuzz")
    headers = [(name, value) for name, value in prepared["headers"].items() if name.lower() == "content-type"]
    parts = (request(case.method, path, data, *headers),)
    if (
        path in GENERATIONS
        and case.method == "POST"
        and ("content-type", "application/json") in [(name.lower(), value) for name, value in headers]
    ):
        return HttpCase("schemathesis", parts, path=path, body=data)
    return HttpCase("schemathesis", parts)
