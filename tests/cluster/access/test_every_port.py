"""Every port of a deployment, and every credential and id that is not good enough: refused, counted, and in the audit.

Real gRPC, HTTPS and Redis, in one process. gRPC tells nobody of failed handshakes: they are counted later.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from cluster.state.journal import open_journal
from paceline.rpc import handshakes
from paceline.rpc.tls import TlsFolder
from paceline.v1 import inference_pb2, inference_pb2_grpc, trace_pb2
from tests.fakes.redis_servers import Embedded
from tests.support.all_ports import (
    CALL_TIMEOUT_S,
    DENIED,
    IN,
    NODES,
    PORTS,
    SHAKEN,
    UNKNOWN,
    Credential,
    Deployment,
    channel_of,
    context_of,
    deployed,
)
from tests.support.certificates import SECRET, expired, make_folder
from tests.support.two_routers import JOURNAL_KEY

OF_HANDSHAKES = ("no TLS", "no certificate", "certificate of another CA", "expired")  # a wrong CA: its client refuses


def table(deployment: Deployment, stranger: TlsFolder, old: TlsFolder, mixed: TlsFolder) -> Iterator[tuple[Any, ...]]:
    """Port, what is shown, and what must come of it."""
    folder = deployment.folder
    for at, port in PORTS.items():
        role, key, node = port.role, port.key, at in NODES
        yield at, "no TLS", Credential(None, "", key), SHAKEN
        yield at, "no certificate", Credential(folder, "", key), SHAKEN
        yield at, "wrong CA", Credential(stranger, role, key), SHAKEN
        yield at, "certificate of another CA", Credential(mixed, role, key), SHAKEN
        yield at, "expired", Credential(old, role, key), SHAKEN
        if port.other_role:
            yield at, "another role", Credential(folder, port.other_role, key), DENIED
        bad_keys = ("", "earlier") if node else ("", "wrong", "revoked", "expired")
        for bad in bad_keys:
            yield at, f"key {bad or 'none'}", Credential(folder, role, bad), DENIED if node else UNKNOWN
        if port.other_key:
            yield at, f"key of scope {port.other_key}", Credential(folder, role, port.other_key), DENIED
        yield at, "what it takes", Credential(folder, role, key), IN


async def test_every_port_and_every_credential(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: a port without client certificates or without keys; a refusal, or a failed handshake of HTTPS, that is
    not counted or has no line; an admin port that takes any certificate of the deployment's."""
    stranger = make_folder(tmp_path / "b")
    async with deployed(tmp_path) as deployment:
        old = expired(deployment.folder, tmp_path / "c")
        mixed = TlsFolder(Path(shutil.copytree(stranger.path, tmp_path / "d")))
        shutil.copy(deployment.folder.path / "ca.pem", mixed.path / "ca.pem")
        found, uncounted, silent = [], [], []
        for at, what, shown, due in table(deployment, stranger, old, mixed):
            before, lines = deployment.refused(), _audit(caplog)
            told = await deployment.ask(PORTS[at], at, shown)
            if told != due:
                found.append((at, what, told, due))
            elif told in (DENIED, UNKNOWN) or (what in OF_HANDSHAKES and at in ("HTTPS", "metrics")):
                if deployment.refused() != before + 1:
                    uncounted.append((at, what))
                if len(_audit(caplog)) != len(lines) + 1:
                    silent.append((at, what))
        assert (found, uncounted, silent) == ([], [], [])
        secrets = [*deployment.keys.secrets.values(), SECRET.call_token]
        assert not any(secret in caplog.text for secret in secrets)


@pytest.mark.parametrize("at", [at for at in PORTS if at not in ("HTTPS", "metrics", "control stream")])
async def test_failed_handshakes_of_grpc(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, with a line each; and no connection that came through, whether it calls or not. Mutants: a port that
    does not hear of beginnings; one that does not hear of calls; one that does not read gRPC's list."""
    monkeypatch.setattr(handshakes, "LOOK_EVERY_S", 0.2)
    monkeypatch.setattr(handshakes, "OVER_S", 2.0)
    async with deployed(tmp_path) as deployment:
        port, good = PORTS[at], Credential(deployment.folder, PORTS[at].role, PORTS[at].key)
        for shown in (good, good, Credential(deployment.folder, port.role, "wrong")):
            assert await deployment.ask(port, at, shown) != SHAKEN
        before, lines = deployment.refused(), len(_audit(caplog))
        assert await deployment.ask(port, at, Credential(deployment.folder, "", port.key)) == SHAKEN
        async with AsyncExitStack() as stack:
            for _ in range(3):
                quiet = await stack.enter_async_context(channel_of(deployment.addresses[at], port.server, good))
                await quiet.channel_ready()
                await asyncio.sleep(0.3)  # it is listed alone
            await asyncio.sleep(2.5)
        failed = int(deployment.refused() - before)
        assert failed in (1, 2)  # a client that learns of it late tries again
        assert [line for line in _audit(caplog)[lines:] if "gRPC handshake" not in line] == []
        assert len(_audit(caplog)) == lines + failed


def _audit(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]


async def test_a_stream_over_http_goes_on_for_its_tenant_alone(tmp_path: Path) -> None:
    """Another tenant with the body and the id of an event. Mutant: a digest of the plan without the tenant's salt."""
    async with deployed(tmp_path) as deployment:
        shown = Credential(deployment.folder, "admin", "acme")
        url = f"https://{deployment.addresses['HTTPS']}/v1/completions"
        body = {"prompt": "hi", "max_tokens": 8, "stream": True}
        async with httpx.AsyncClient(verify=context_of(shown), timeout=CALL_TIMEOUT_S) as client:

            async def ask(key: str, **headers: str) -> httpx.Response:
                return await client.post(url, json=body, headers=dict(deployment.metadata(key)) | headers)

            first = (await ask("acme")).text.split("\n", 1)[0].removeprefix("id: ")
            assert (await ask("acme", **{"last-event-id": first})).status_code == 200
            assert (await ask("other", **{"last-event-id": first})).status_code == 409


STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
}
GENERATION, REQUEST = "g" * 32, "job"


class Asking:
    """Calls with a key over gRPC and HTTP; each gives what its caller is told, without the id that it named."""

    def __init__(self, deployment: Deployment, stub: Any, http: httpx.AsyncClient) -> None:
        self._deployment, self._stub, self._http = deployment, stub, http

    async def resume(self, key: str, generation_id: str, tenant: str = "") -> str:
        """Go on with a stream that a router has in the journal."""
        resume = inference_pb2.Resume()
        return await self.stream(
            key, inference_pb2.GenerateRequest(generation_id=generation_id, tenant=tenant, resume=resume)
        )

    async def stream(self, key: str, request: Any) -> str:
        call = self._stub.GenerateStream(request, metadata=self._deployment.metadata(key), timeout=CALL_TIMEOUT_S)
        return await _told(call.read(), request.generation_id)

    async def trace(self, key: str, request_id: str) -> str:
        request = trace_pb2.TraceRequest(request_id=request_id)
        call = self._stub.Trace(request, metadata=self._deployment.metadata(key), timeout=CALL_TIMEOUT_S)
        return await _told(call, request_id)

    async def events(self, key: str, path: str, event_id: str = "") -> httpx.Response:
        """A stream over HTTP, or what comes of it after an event."""
        since = {"last-event-id": event_id} if event_id else {}
        headers = dict(self._deployment.metadata(key)) | since
        return await self._http.post(path, json=STREAMS[path] | {"stream": True}, headers=headers)

    async def http(self, key: str, method: str, path: str, named: str, body: Any = None) -> str:
        headers = dict(self._deployment.metadata(key))
        reply = await self._http.request(method, path, json=body, headers=headers)
        return f"{reply.status_code} {reply.text.replace(named, 'ID')}"


async def _told(asked: Awaitable[Any], named: str) -> str:
    try:
        await asked
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name} {error.details()}".replace(named, "ID")
    return IN


@asynccontextmanager
async def asking(deployment: Deployment) -> AsyncIterator[Asking]:
    """A caller of the router, whose streams are in a journal."""
    shown = Credential(deployment.folder, "admin", "")
    redis = Embedded()
    journal = open_journal(deployment.router.config, redis.url, JOURNAL_KEY)
    assert journal is not None
    deployment.router._journal = journal
    base = f"https://{deployment.addresses['HTTPS']}"
    try:
        async with (
            channel_of(deployment.addresses["router gRPC"], "server", shown) as channel,
            httpx.AsyncClient(verify=context_of(shown), timeout=CALL_TIMEOUT_S, base_url=base) as http,
        ):
            yield Asking(deployment, inference_pb2_grpc.InferenceStub(channel), http)
    finally:
        await journal.close()
        redis.close()


Ask = Callable[[str], Awaitable[str]]


async def asks_by_id(made: Asking, key: str) -> list[tuple[str, Ask, str, str]]:
    """What is asked, how, the id of another tenant's, and one that never was."""
    request = inference_pb2.GenerateRequest(text="hello", generation_id=GENERATION, request_id=REQUEST)
    assert await made.stream("acme", request) == IN
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while await made.resume("acme", GENERATION) != IN:  # it is not written yet
            await asyncio.sleep(0.02)
    assert await made.trace("acme", REQUEST) == IN
    found: list[tuple[str, Ask, str, str]] = [
        ("resume", lambda named: made.resume(key, named), GENERATION, "h" * 32),
        ("trace", lambda named: made.trace(key, named), REQUEST, "none"),
    ]
    for path in STREAMS:
        text = (await made.events("acme", path)).text
        event_id = text.split("id: ", 1)[1].split("\n", 1)[0]
        again = await made.events("acme", path, event_id)
        assert again.status_code == 200, again.text

        async def resumed(named: str, path: str = path) -> str:
            reply = await made.events(key, path, named)
            return f"{reply.status_code} {reply.text}"

        none = re.sub(r"\.[0-9a-f]{32}\.", f".{'0' * 32}.", event_id)
        found.append((f"Last-Event-ID {path}", resumed, event_id, none))
    response = json.loads(re.findall(r"data: (.*)", text)[-1])["response"]["id"]
    for method, rest in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):

        async def about(named: str, method: str = method, rest: str = rest) -> str:
            return await made.http(key, method, f"/v1/responses/{named}{rest}", named)

        found.append((f"{method} response{rest}", about, response, f"resp_{'0' * 32}"))

    async def went_on(named: str) -> str:
        body = {"input": "go on", "previous_response_id": named}
        return await made.http(key, "POST", "/v1/responses", named, body)

    return [*found, ("previous_response_id", went_on, response, f"resp_{'0' * 32}")]


async def test_another_tenants_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for beside ids that never were: the answers are alike, so nobody learns that an id exists. Mutants: a way
    that counts nothing, or writes no line; another tenant's ids alone are counted."""
    async with deployed(tmp_path) as deployment, asking(deployment) as made:
        asked = await asks_by_id(made, "other")
        assert (deployment.refused("UnknownId"), _audit(caplog)) == (0, [])  # their tenant was let in everywhere
        for what, ask, theirs, none in asked:
            answers = []
            for named in (theirs, none):
                before, lines = deployment.refused("UnknownId"), len(_audit(caplog))
                answers.append(await ask(named))
                assert deployment.refused("UnknownId") == before + 1, (what, named, answers)
                (line,) = _audit(caplog)[lines:]
                assert line.startswith("peer=127.0.0.1 key=other "), line
                assert named not in line, line
            assert answers[0] == answers[1] != IN, what
        assert (await made.resume("other", GENERATION, tenant="acme")).startswith("INVALID_ARGUMENT tenant: ")
        assert deployment.refused("OtherTenant") == 1
        assert "names another tenant" in _audit(caplog)[-1]
        assert await made.resume("acme", GENERATION) == IN  # it is still there
