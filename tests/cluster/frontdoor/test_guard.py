"""Who may use the HTTP surface: every route, every kind of key, and the answer before a body is read."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from cluster.access.caller import tenant_salt
from cluster.frontdoor import http_server
from cluster.frontdoor.guard import NEEDS
from cluster.frontdoor.http import HttpOptions, create_app, serve_http
from cluster.routing.metrics import Metrics
from paceline.errors import Overloaded
from paceline.rpc import audit
from tests.support.api_keys import Keys, write_keys
from tests.support.fake_router import MODEL, FakeRouter

ASK: dict[str, Any] = {"/v1/completions": {"prompt": "hi"}, "/v1/responses": {"input": "hi"}}
ASK |= {"/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}}
# What each kind of key is told where a scope is needed; the rest are let in.
OF_KEY = {"": 401, "wrong": 401, "revoked": 401, "expired": 401}
REFUSED = {
    "open": {},
    "key": OF_KEY,
    "infer": OF_KEY | {"metrics": 403, "operator": 403, "model": 403},
    "metrics": OF_KEY | {"acme": 403, "other": 403, "operator": 403, "model": 403},
}


class Surface:
    """The application behind one file of keys."""

    def __init__(self, folder: Path) -> None:
        self.keys: Keys = write_keys(folder / "keys.yaml")
        self.router, self.metrics = FakeRouter(), Metrics()
        self.access = self.keys.access(MODEL, self.metrics)
        self.app: Any = create_app(self.router, self.metrics, HttpOptions(access=self.access))


@pytest.fixture(scope="module")
def surface(tmp_path_factory: pytest.TempPathFactory) -> Surface:
    return Surface(tmp_path_factory.mktemp("keys"))


@pytest.fixture
async def asking(surface: Surface) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(surface.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        yield client


def test_every_route_has_a_decision(surface: Surface) -> None:
    """Mutant: a route that nobody decided on."""
    routes = {getattr(route, "path", "?") for route in surface.app.routes}
    assert routes == set(NEEDS)
    assert {path for path, need in NEEDS.items() if need.value == "open"} == {"/health", "/ping"}


async def test_every_route_and_every_kind_of_key(
    surface: Surface, asking: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "paceline.audit")
    for route in surface.app.routes:
        path = str(route.path).replace("{name:path}", "x/y").replace("{response_id}", "resp_1")
        method = next(iter(route.methods & {"GET", "POST", "DELETE"}))
        refused = REFUSED[NEEDS[route.path].value]
        for name in ("", *surface.keys.secrets):
            if name == "slow":
                continue
            response = await asking.request(method, path, json={}, headers=surface.keys.header(name))
            expected = refused.get(name)
            assert expected is None or response.status_code == expected, (method, path, name)
            assert expected is not None or response.status_code not in (401, 403), (method, path, name)
            if expected:
                told = response.json()["error"]
                assert told["type"] == ("authentication_error" if expected == 401 else "permission_error")
            assert ("www-authenticate" in response.headers) == (response.status_code == 401)
    assert (await asking.get("/nowhere")).status_code == 401
    assert b'paceline_access_refused_total{reason="PermissionDenied"}' in surface.metrics.render()


async def test_another_spelling_of_a_path_is_no_way_past_a_scope(surface: Surface, asking: httpx.AsyncClient) -> None:
    """Starlette's routes take a newline at the end of a path. Mutant: templates are compared as text."""
    for path, need in NEEDS.items():
        if "{" in path or need.value not in ("infer", "metrics"):
            continue
        without = "metrics" if need.value == "infer" else "acme"
        for ending in ("%0A", "%0A/", "/", "//"):
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                told = await asking.request(method, path + ending, json={}, headers=surface.keys.header(without))
                assert told.status_code in (403, 404, 405), (method, path, ending)


async def test_anthropics_header_and_shape(surface: Surface, asking: httpx.AsyncClient) -> None:
    key = surface.keys.secrets["acme"]
    for path, status in (("/v1/messages", 200), ("/v1/completions", 401)):
        response = await asking.post(path, json=ASK[path], headers={"x-api-key": key})
        assert response.status_code == status, response.text
    refused = (await asking.post("/v1/messages", json={})).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")


async def test_the_answer_comes_before_the_body(
    surface: Surface, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client sends headers and no body. Mutants: the key is asked for in the route; the connection stays; the address
    is what the client says it is."""
    monkeypatch.setattr(http_server, "REST_TIMEOUT_S", 0.1)
    told = surface.access.audit  # tests before this one had used up its lines
    told._addresses, told._keys = audit._Callers(), audit._Callers()
    server = await serve_http(surface.app, "127.0.0.1", 0)
    try:
        for name, status in (("", b"401"), ("wrong", b"401"), ("metrics", b"403")):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            fields = {"host": "x", "content-length": "8000000", "x-forwarded-for": "6.6.6.6 key=ops"}
            head = "".join(f"{field}: {value}\r\n" for field, value in (fields | surface.keys.header(name)).items())
            writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode())
            async with asyncio.timeout(5):
                assert (await reader.readuntil(b"\r\n")).split()[1] == status
                await reader.read()  # and the connection is closed
            writer.close()
    finally:
        await server.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]
    assert [line.split(" outcome")[0] for line in lines] == [
        "peer=127.0.0.1 key=- act='POST /v1/completions'",
        "peer=127.0.0.1 key=- act='POST /v1/completions'",
        "peer=127.0.0.1 key=metrics act='POST /v1/completions'",
    ]
    assert not any(secret in caplog.text for secret in surface.keys.secrets.values())


async def test_the_rest_of_a_refused_body_is_read_at_a_pace(surface: Surface, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection goes on after it. Mutants: it is read as fast as it comes; nothing more is read of it."""
    monkeypatch.setattr(http_server, "REST_PER_S", per_s := 2**19)
    size, loop = per_s + per_s // 2, asyncio.get_running_loop()
    server = await serve_http(surface.app, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        began = loop.time()
        for _ in range(2):
            writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode())
            async with asyncio.timeout(5):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.split()[1] == b"401"
                (length,) = (line.split()[1] for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length))
            writer.write(bytes(size))
        took_s = loop.time() - began
    finally:
        writer.close()
        await server.stop()
    assert took_s > 0.4


async def test_every_call_of_a_key_has_one_line_where_it_is_asked_for(
    surface: Surface, asking: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that its quota refuses. Mutants: refused calls and operators' alone; lines without asking for them."""

    async def call(path: str) -> int:
        return (await asking.post(path, json=ASK[path], headers=surface.keys.header("acme"))).status_code

    for asked_for in (False, True):
        caplog.clear()
        monkeypatch.setattr(surface.access, "_audits_calls", asked_for)
        assert [await call(path) for path in ASK] == [200] * 3
        monkeypatch.setattr(surface.access.quotas, "request", AsyncMock(side_effect=Overloaded("no more")))
        assert await call("/v1/messages") in (429, 529)
        monkeypatch.undo()
        lines = [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]
        acts = [*(f"'POST {path}' outcome='allowed'" for path in ASK), "'POST /v1/messages' outcome='refused: "]
        assert [act in line for act, line in zip(acts, lines, strict=asked_for)] == [True] * 4 * asked_for
        assert all("peer=127.0.0.1 key=acme" in line for line in lines)


async def test_the_tenant_is_that_of_the_key(surface: Surface, asking: httpx.AsyncClient) -> None:
    """Whatever the body says. Mutant: the body's salt alone."""
    salts = set()
    for path, body in ASK.items():
        for name in ("acme", "other"):
            for salt in ({}, {"cache_salt": "acme"}):
                response = await asking.post(path, json=body | salt, headers=surface.keys.header(name))
                assert response.status_code == 200, response.text
                asked = surface.router.asked[-1]
                assert asked.tenant == name
                salts.add((name, salt.get("cache_salt", ""), asked.cache_salt))
    assert {salt for *_, salt in salts} == {tenant_salt(n, s) for n in ("acme", "other") for s in ("", "acme")}
    assert len(salts) == 4
    claimed = await asking.post(
        "/v1/completions", json=ASK["/v1/completions"] | {"tenant": "other"}, headers=surface.keys.header("acme")
    )
    assert (claimed.status_code, claimed.json()["error"]["param"]) == (400, "tenant")


async def test_stored_answers_are_their_tenants(surface: Surface, asking: httpx.AsyncClient) -> None:
    made = await asking.post("/v1/responses", json={"input": "hi"}, headers=surface.keys.header("acme"))
    path = f"/v1/responses/{made.json()['id']}"
    for name, query, status in (("acme", {}, 200), ("other", {}, 404), ("other", {"cache_salt": "acme"}, 404)):
        got = await asking.get(path, params=query, headers=surface.keys.header(name))
        assert got.status_code == status, (name, query)
    body = {"input": "go on", "previous_response_id": made.json()["id"]}
    for name, status in (("other", 400), ("acme", 200)):
        assert (await asking.post("/v1/responses", json=body, headers=surface.keys.header(name))).status_code == status
    assert (await asking.delete(path, headers=surface.keys.header("other"))).status_code == 404


async def test_requests_a_minute(surface: Surface, asking: httpx.AsyncClient) -> None:
    answers = [await asking.get("/v1/models", headers=surface.keys.header("slow")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 25 <= int(answers[-1].headers["retry-after"]) <= 30
    assert json.loads(answers[-1].text)["error"]["type"] == "rate_limit_error"
