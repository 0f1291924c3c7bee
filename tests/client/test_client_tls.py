"""The public side over TLS: gRPC for both clients and HTTPS, a certificate that is renewed, clients that need one."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest
import typer.testing

from cluster.commands import certificates
from cluster.commands.cli import app
from cluster.frontdoor.http import create_app
from cluster.frontdoor.http_server import serve_http
from cluster.frontdoor.service import serve_grpc
from cluster.nodes.admin import AdminService, serve_admin
from cluster.routing.metrics import Metrics
from paceline.client import AsyncClient, Client, NodeUnavailable
from paceline.client.channel import Tls
from paceline.errors import ConfigError
from paceline.rpc.identity import Identity
from paceline.rpc.tls import TlsFolder
from paceline.v1 import admin_pb2, admin_pb2_grpc
from tests.support.certificates import make_folder
from tests.support.scripted_nodes import fleet, letters

TEXT = letters(5, 5, 12)


@asynccontextmanager
async def served(tls: TlsFolder) -> AsyncIterator[tuple[str, str]]:
    """A router's gRPC and HTTPS addresses."""
    async with fleet() as made:
        server = await serve_grpc(made.router, "127.0.0.1:0", tls=tls)
        http = await serve_http(create_app(made.router, Metrics()), "127.0.0.1", 0, tls)
        try:
            yield f"127.0.0.1:{server.port}", f"https://127.0.0.1:{http.port}"
        finally:
            await http.stop()
            await server.stop(0)


async def text_of(address: str, tls: Tls) -> str:
    async with AsyncClient(address, tls=tls, timeout=5) as client:
        return (await client.generate("hello", max_tokens=12, seed=5)).text


def trusting(ca: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=ssl.create_default_context(cafile=ca), timeout=5)


async def test_clients_check_the_router_and_it_is_renewed_without_a_restart(tmp_path: Path) -> None:
    """Mutant: `public_context` or `public_credentials` reads its files once."""
    folder, stranger = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    ca, other_ca = folder.path / "ca.pem", stranger.path / "ca.pem"
    async with served(folder) as (address, url):

        async def refused(ca: Path) -> None:
            with pytest.raises(NodeUnavailable):
                await text_of(address, ca)
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                async with trusting(ca) as client:
                    await client.get(f"{url}/health")

        async def answered(ca: Path) -> None:
            assert await text_of(address, ca) == TEXT
            async with trusting(ca) as client:
                assert (await client.get(f"{url}/health")).status_code == 200

        await answered(ca)
        await refused(other_ca)
        with pytest.raises(NodeUnavailable):
            await text_of(address, False)
        with pytest.raises(NodeUnavailable):
            await text_of(address, True)  # no root of this system's

        def generate() -> str:
            with Client(address, tls=ca, timeout=5) as client:
                return client.generate("hello", max_tokens=12, seed=5).text

        assert await asyncio.to_thread(generate) == TEXT
        command = ["generate", "hello", "--server", address, "--tls-ca", str(ca), "--seed", "5", "--max-tokens", "12"]
        shown = await asyncio.to_thread(typer.testing.CliRunner().invoke, app, command)
        assert shown.stdout.strip() == TEXT
        for name in ("server.key", "server.pem"):
            shutil.copy(stranger.path / name, folder.path / name)
        await answered(other_ca)
        await refused(ca)
        (folder.path / "server.pem").unlink()  # it is being replaced
        await answered(other_ca)


async def test_with_a_ca_for_clients_they_need_a_certificate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    shutil.copy(folder.path / "ca.pem", folder.path / "client-ca.pem")
    ca, own = folder.path / "ca.pem", folder.path / "admin"
    async with served(folder) as (address, url):
        with pytest.raises(NodeUnavailable):
            await text_of(address, ca)
        pem, key = own.with_suffix(".pem"), own.with_suffix(".key")
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), pem.read_bytes())
        assert await text_of(address, credentials) == TEXT
        with pytest.raises(httpx.TransportError):
            async with trusting(ca) as client:
                await client.get(f"{url}/health")
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(pem, key)
        async with httpx.AsyncClient(verify=context, timeout=5) as client:
            assert (await client.get(f"{url}/health")).status_code == 200


async def test_operators_need_their_own_certificate(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    asked = admin_pb2.SetRoleRequest(node_id="decode-0", role="prefill")
    service = AdminService(None, None, 1.0)  # type: ignore[arg-type]
    server = await serve_admin(service, "127.0.0.1:0", Identity("router", "", folder))
    try:
        codes = []
        for role in ("admin", "prefill"):
            async with Identity(role, "", folder).channel(f"127.0.0.1:{server.port}", "router") as channel:
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await admin_pb2_grpc.AdminStub(channel).SetRole(asked, timeout=5)
                codes.append(failed.value.code())
        assert codes == [grpc.StatusCode.UNKNOWN, grpc.StatusCode.PERMISSION_DENIED]  # there is no supervisor behind it
    finally:
        await server.stop()


def test_certificates_are_made_shown_and_renewed_once(tmp_path: Path) -> None:
    runner = typer.testing.CliRunner()
    folder = tmp_path / "certs"
    made = runner.invoke(app, ["certs", "init", str(folder), "--hosts", "api.example.org, 10.0.0.1", "--days", "30"])
    assert made.exit_code == 0
    assert {file.stat().st_mode & 0o777 for file in folder.glob("*.key")} == {0o600}
    shown = {one.file: one for one in certificates.show(folder)}
    assert shown["server.pem"].whom == "api.example.org, 10.0.0.1"
    assert {one.whom for one in shown.values()} >= {"router", "prefill", "decode", "admin"}
    assert shown["router.pem"].days_left == 29
    with pytest.raises(ConfigError, match="has a CA already"):
        certificates.init(folder, "default", [], 1)
    key = (folder / "router.key").read_bytes()
    assert runner.invoke(app, ["certs", "renew", str(folder), "--days", "60"]).exit_code == 0
    assert (folder / "router.key").read_bytes() == key  # the pair fits at every moment
    renewed = {one.file: one for one in certificates.show(folder)}
    assert [renewed[name].days_left for name in ("router.pem", "server.pem")] == [59, 59]
    assert renewed["server.pem"].whom == shown["server.pem"].whom
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca\.key"):
        certificates.renew(folder, 60)


def test_a_folder_that_lacks_a_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a")
    Identity("router", "", folder).check()
    (folder.path / "router.key").unlink()
    with pytest.raises(ConfigError, match=r"tls_dir: .*router\.key: No such file"):
        Identity("router", "", folder).check()
