"""Every port of a deployment and every credential that is not good enough: refused, counted, and a line in the audit.

Real gRPC, HTTPS and Redis, in one process. What a handshake refuses never reaches Paceline: it has no line.
"""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from cluster.access.access import Access
from cluster.frontdoor.http import HttpOptions, create_app, serve_http
from cluster.frontdoor.service import operators_gate, serve_grpc
from cluster.nodes.admin import METHODS, serve_admin
from cluster.routing.metrics import Metrics
from paceline.rpc.identity import Identity, Secret
from paceline.rpc.tls import TlsFolder
from paceline.v1 import handoff_pb2
from tests.fakes.nodes import Cluster
from tests.support.api_keys import Keys, write_keys
from tests.support.certificates import SECRET, expired, make_folder, secured
from tests.support.scripted_nodes import fleet

CALL_TIMEOUT_S = 5.0
Code = grpc.StatusCode
HELLO = handoff_pb2.HandoffMessage(hello=handoff_pb2.Hello(link_id="?")).SerializeToString()
SHAKEN, DENIED, UNKNOWN, IN = "handshake", "denied", "unauthenticated", "let in"


@dataclass(frozen=True)
class Credential:
    """What a caller shows. folder: of certificates; None: no TLS. role: whose certificate; empty: none. key: by name,
    and the token between parts."""

    folder: TlsFolder | None
    role: str
    key: str


@dataclass(frozen=True)
class Port:
    """Who may call it: whose certificate, with which key (nodes: the deployment's token); and a key for another."""

    method: str  # of gRPC, or a path of HTTP
    role: str
    key: str
    other_role: str = ""  # of a certificate that is refused; empty: the public side takes any that its CA signed
    other_key: str = ""
    server: str = "server"  # whose certificate it shows


PORTS = {
    "router gRPC": Port("/paceline.v1.Inference/Tokenize", "admin", "acme", other_key="metrics"),
    "HTTPS": Port("/tokenize", "admin", "acme", other_key="metrics"),
    "metrics": Port("/metrics", "admin", "metrics", other_key="acme"),
    "admin": Port("/paceline.v1.Admin/SetRole", "admin", "operator", "router", "acme", "router"),
    "prefill node": Port("/paceline.v1.PrefillNode/Status", "router", "token", "decode", server="prefill"),
    "decode node": Port("/paceline.v1.DecodeNode/Status", "router", "token", "prefill", server="decode"),
    "control stream": Port("/paceline.v1.DecodeNode/Handoff", "prefill", "token", "router", server="decode"),
}
NODES = ("prefill node", "decode node", "control stream")


@dataclass
class Deployment:
    """All ports, by name, and who counts what they refuse."""

    folder: TlsFolder
    keys: Keys
    nodes: Cluster
    metrics: Metrics
    addresses: dict[str, str] = field(default_factory=dict)

    def refused(self) -> float:
        """Calls that were refused, at all ports."""
        counted = self.nodes.decode.shell.guard.refused + self.nodes.prefill.shell.guard.refused
        told = self.metrics.render().decode().splitlines()
        return counted + sum(
            float(line.split()[-1]) for line in told if line.startswith("paceline_access_refused_total")
        )

    def metadata(self, key: str) -> tuple[tuple[str, str], ...]:
        """A caller's key."""
        tokens = {"token": SECRET.call_token, "earlier": Secret("the secret of before").call_token}
        if key in tokens:
            return Identity("router", tokens[key]).metadata
        return tuple(self.keys.header(key).items())

    async def ask(self, port: Port, at: str, shown: Credential) -> str:
        """How a call ends."""
        if at in ("HTTPS", "metrics"):
            return await self._ask_http(port, shown)
        async with _channel(self.addresses[at], port.server, shown) as channel:
            opened: Any = channel
            call = opened.stream_stream(port.method)(metadata=self.metadata(shown.key), timeout=CALL_TIMEOUT_S)
            is_right = shown.key == port.key and shown.role == port.role
            try:
                if shown.key == port.key:  # who has no good key is refused before its message
                    await call.write(HELLO if at == "control stream" else b"")
                    await call.done_writing()
                    if await call.read() is not grpc.aio.EOF:
                        return IN
                code, details = await call.code(), await call.details()
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details()
        if code is Code.UNAVAILABLE and "link" in str(details):  # the control stream is asked for one that is not there
            return IN
        told = {Code.PERMISSION_DENIED: DENIED, Code.UNAUTHENTICATED: UNKNOWN, Code.UNAVAILABLE: SHAKEN}
        return told.get(code, IN if is_right else str(code))  # what is let in is then told what it lacks

    async def _ask_http(self, port: Port, shown: Credential) -> str:
        scheme = "http" if shown.folder is None else "https"
        url = f"{scheme}://{self.addresses['HTTPS']}{port.method}"
        try:
            async with httpx.AsyncClient(verify=_context(shown), timeout=CALL_TIMEOUT_S) as client:
                headers = dict(self.metadata(shown.key))
                method = "GET" if port.method == "/metrics" else "POST"
                status = (await client.request(method, url, headers=headers, json={"prompt": "hi"})).status_code
        except httpx.TransportError:
            return SHAKEN
        return {401: UNKNOWN, 403: DENIED, 200: IN}[status]


def _channel(address: str, server: str, shown: Credential) -> grpc.aio.Channel:
    if shown.folder is None:
        return grpc.aio.insecure_channel(address)
    path = shown.folder.path
    own = [(path / f"{shown.role}.{kind}").read_bytes() for kind in ("key", "pem")] if shown.role else [None, None]
    credentials = grpc.ssl_channel_credentials((path / "ca.pem").read_bytes(), *own)
    named = [] if server == "server" else [("grpc.ssl_target_name_override", f"{server}.paceline")]
    return grpc.aio.secure_channel(address, credentials, options=named)


def _context(shown: Credential) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if shown.folder is not None:
        context.load_verify_locations(shown.folder.path / "ca.pem")
        if shown.role:
            own = shown.folder.path / shown.role
            context.load_cert_chain(own.with_suffix(".pem"), own.with_suffix(".key"))
    return context


@asynccontextmanager
async def deployed(path: Path) -> AsyncIterator[Deployment]:
    """Everything that listens, with TLS, certificates of clients, and keys."""
    folder = make_folder(path / "certs")
    shutil.copy(folder.path / "ca.pem", folder.path / "client-ca.pem")
    keys, metrics = write_keys(path / "keys.yaml"), Metrics()
    access = keys.access("tiny", metrics)
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(secured(folder))
        router = (await stack.enter_async_context(fleet())).router
        made = Deployment(folder, keys, nodes, metrics)
        await _open_front(made, router, access, stack)
        made.addresses |= dict.fromkeys(("decode node", "control stream"), nodes.decode_address)
        made.addresses["prefill node"] = nodes.prefill.shell.load().address
        yield made


async def _open_front(made: Deployment, router: Any, access: Access, stack: AsyncExitStack) -> None:
    server = await serve_grpc(router, "127.0.0.1:0", access, tls=made.folder)
    stack.push_async_callback(server.stop, 0)
    options = HttpOptions(access=access, resumable=True)
    http = await serve_http(create_app(router, made.metrics, options), "127.0.0.1", 0, made.folder)
    stack.push_async_callback(http.stop)
    gate = operators_gate(METHODS, access)
    nobody: Any = None  # supervises: whoever is let in is told so
    admin = await serve_admin(
        nobody,
        "127.0.0.1:0",
        1.0,
        Identity("router", "", made.folder),
        [gate],
        lambda: made.metrics.access_refused("PermissionDenied"),
    )
    stack.push_async_callback(admin.stop)
    ports = {"router gRPC": server.port, "HTTPS": http.port, "admin": admin.port}
    made.addresses |= {name: f"127.0.0.1:{port}" for name, port in ports.items()}


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
    """Mutants: a port without client certificates or without keys; a refusal that is not counted or has no line; an
    admin port that takes any certificate of the deployment's."""
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
            elif told in (DENIED, UNKNOWN):
                if deployment.refused() != before + 1:
                    uncounted.append((at, what))
                if len(_audit(caplog)) != len(lines) + 1:
                    silent.append((at, what))
        assert (found, uncounted, silent) == ([], [], [])
        secrets = [*deployment.keys.secrets.values(), SECRET.call_token]
        assert not any(secret in caplog.text for secret in secrets)


def _audit(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]


async def test_a_stream_over_http_goes_on_for_its_tenant_alone(tmp_path: Path) -> None:
    """Another tenant with the body and the id of an event. Mutant: a digest of the plan without the tenant's salt."""
    async with deployed(tmp_path) as deployment:
        shown = Credential(deployment.folder, "admin", "acme")
        url = f"https://{deployment.addresses['HTTPS']}/v1/completions"
        body = {"prompt": "hi", "max_tokens": 8, "stream": True}
        async with httpx.AsyncClient(verify=_context(shown), timeout=CALL_TIMEOUT_S) as client:

            async def ask(key: str, **headers: str) -> httpx.Response:
                return await client.post(url, json=body, headers=dict(deployment.metadata(key)) | headers)

            first = (await ask("acme")).text.split("\n", 1)[0].removeprefix("id: ")
            assert (await ask("acme", **{"last-event-id": first})).status_code == 200
            assert (await ask("other", **{"last-event-id": first})).status_code == 409
