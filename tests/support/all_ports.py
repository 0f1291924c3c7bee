"""Every port of a deployment in this process, and callers with any credential. Real gRPC, HTTPS and TLS."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from cluster.access.access import Access, handshakes_refused
from cluster.frontdoor.http import HttpOptions, create_app, serve_http
from cluster.frontdoor.service import operators_gate, serve_grpc
from cluster.nodes.admin import METHODS, AdminService, serve_admin
from cluster.routing.metrics import Metrics
from cluster.routing.router import Router
from paceline.rpc.identity import Identity, Secret
from paceline.rpc.tls import TlsFolder
from paceline.v1 import handoff_pb2
from tests.fakes.nodes import Cluster
from tests.support.api_keys import Keys, write_keys
from tests.support.certificates import SECRET, make_folder, secured
from tests.support.scripted_nodes import fleet

CALL_TIMEOUT_S = 5.0
REFUSED = "paceline_access_refused_total"
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
    router: Router
    addresses: dict[str, str] = field(default_factory=dict)

    def refused(self, reason: str = "") -> float:
        """Calls that were refused, at all ports; with a ``reason`` those of keys for it alone."""
        counted = self.nodes.decode.shell.guard.refused + self.nodes.prefill.shell.guard.refused
        told = [line for line in self.metrics.render().decode().splitlines() if line.startswith(REFUSED)]
        if reason:
            counted, told = 0, [line for line in told if f'reason="{reason}"' in line]
        return counted + sum(float(line.split()[-1]) for line in told)

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
        async with channel_of(self.addresses[at], port.server, shown) as channel:
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
            async with httpx.AsyncClient(verify=context_of(shown), timeout=CALL_TIMEOUT_S) as client:
                headers = dict(self.metadata(shown.key))
                method = "GET" if port.method == "/metrics" else "POST"
                status = (await client.request(method, url, headers=headers, json={"prompt": "hi"})).status_code
        except httpx.TransportError:
            return SHAKEN
        return {401: UNKNOWN, 403: DENIED, 200: IN}[status]


def channel_of(address: str, server: str, shown: Credential) -> grpc.aio.Channel:
    """To a port that shows the certificate of ``server``, for a caller who shows ``shown``."""
    if shown.folder is None:
        return grpc.aio.insecure_channel(address)
    path = shown.folder.path
    own = [(path / f"{shown.role}.{kind}").read_bytes() for kind in ("key", "pem")] if shown.role else [None, None]
    credentials = grpc.ssl_channel_credentials((path / "ca.pem").read_bytes(), *own)
    named = [] if server == "server" else [("grpc.ssl_target_name_override", f"{server}.paceline")]
    return grpc.aio.secure_channel(address, credentials, options=named)


def context_of(shown: Credential) -> ssl.SSLContext:
    """TLS of a client that shows it."""
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
        made = Deployment(folder, keys, nodes, metrics, router)
        await _open_front(made, access, stack)
        made.addresses |= dict.fromkeys(("decode node", "control stream"), nodes.decode_address)
        made.addresses["prefill node"] = nodes.prefill.shell.load().address
        yield made


async def _open_front(made: Deployment, access: Access, stack: AsyncExitStack) -> None:
    refused = partial(handshakes_refused, made.metrics, access.audit)
    server = await serve_grpc(made.router, "127.0.0.1:0", access, tls=made.folder, on_failed=refused("gRPC"))
    stack.push_async_callback(server.stop, 0)
    options = HttpOptions(access=access, resumable=True)
    http = await serve_http(
        create_app(made.router, made.metrics, options), "127.0.0.1", 0, made.folder, refused("HTTPS")
    )
    stack.push_async_callback(http.stop)
    gate = operators_gate(METHODS, access)
    nobody: Any = None  # supervises: whoever is let in is told so
    admin = await serve_admin(
        AdminService(nobody, nobody, 1.0),
        "127.0.0.1:0",
        Identity("router", "", made.folder),
        [gate],
        lambda: made.metrics.access_refused("PermissionDenied"),
        refused("gRPC"),
    )
    stack.push_async_callback(admin.stop)
    ports = {"router gRPC": server.port, "HTTPS": http.port, "admin": admin.port}
    made.addresses |= {name: f"127.0.0.1:{port}" for name, port in ports.items()}
