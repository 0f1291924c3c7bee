"""Who may call a node: parts of the deployment, each its own RPCs. Real gRPC, real certificates."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from cluster.commands import certificates
from cluster.routing.node_calls import NodeCalls
from cluster.state.registry_types import NodeRecord
from paceline.errors import ConfigError
from paceline.rpc.audit import LINES_PER_MINUTE
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity
from paceline.rpc.tls import Role, TlsFolder
from paceline.v1 import handoff_pb2, node_pb2, node_pb2_grpc, trace_pb2
from paceline.wire import sequence_to_proto
from prefill_node.control import ControlStream
from tests.fakes.nodes import Cluster, sequence_request
from tests.fakes.runner import expected_output
from tests.support.certificates import SECRET, expired, identity, make_folder, secured

CALL_TIMEOUT_S = 5.0
RPCS: dict[str, tuple[Role, Role]] = {  # who serves it, who may call it
    "Decode": ("decode", "router"),
    "Pair": ("decode", "prefill"),
    "Handoff": ("decode", "prefill"),
    "Status": ("decode", "router"),
    "Trace": ("decode", "router"),
    "Recall": ("decode", "router"),
    "Prefill": ("prefill", "router"),
    "Connect": ("prefill", "router"),
    "prefill's Status": ("prefill", "router"),
    "prefill's Trace": ("prefill", "router"),
}
REQUESTS: dict[str, Any] = {
    "Decode": node_pb2.DecodeRequest(),
    "Pair": handoff_pb2.PairRequest(),
    "Handoff": handoff_pb2.HandoffMessage(hello=handoff_pb2.Hello(link_id="?")),
    "Status": node_pb2.StatusRequest(),
    "Trace": trace_pb2.TraceRequest(),
    "Recall": node_pb2.RecallRequest(),
    "Prefill": node_pb2.PrefillRequest(),
    "Connect": node_pb2.ConnectRequest(),
}


async def ask(nodes: Cluster, name: str, caller: Identity, *, proves_itself: bool = True) -> grpc.StatusCode:
    """The status of one RPC. proves_itself not: connects with the CA alone."""
    server, _ = RPCS[name]
    address = nodes.decode_address if server == "decode" else nodes.prefill.shell.load().address
    stub: Any = node_pb2_grpc.DecodeNodeStub if server == "decode" else node_pb2_grpc.PrefillNodeStub
    channel = caller.channel(address, server, ())
    if not proves_itself and caller.tls is not None:
        credentials = grpc.ssl_channel_credentials((caller.tls.path / "ca.pem").read_bytes())
        named = [("grpc.ssl_target_name_override", f"{server}.paceline")]
        channel = grpc.aio.secure_channel(address, credentials, options=named)
    method = name.rpartition(" ")[2]
    async with channel:
        call = getattr(stub(channel), method)
        request: Any = REQUESTS[method]
        if method == "Handoff":

            async def hello() -> AsyncIterator[handoff_pb2.HandoffMessage]:
                yield REQUESTS[method]

            request = hello()
        made = call(request, metadata=caller.metadata, timeout=CALL_TIMEOUT_S)
        try:
            if method in ("Decode", "Handoff", "Prefill"):
                async for _ in made:
                    pass
            else:
                await made
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_every_rpc_is_for_its_callers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: a method of another role's in CALLERS, a token that is not compared, a server that asks for no
    certificate."""
    folder = make_folder(tmp_path / "a")
    stranger, old = make_folder(tmp_path / "b"), expired(folder, tmp_path / "c")
    unavailable, denied = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED
    roles: tuple[Role, ...] = ("router", "prefill", "decode", "admin")
    # A server that refuses before it has read the request may end the stream first; gRPC calls that INTERNAL.
    unread = (denied, grpc.StatusCode.INTERNAL)
    async with secured(folder) as nodes:
        for name, (_, caller) in RPCS.items():
            assert await ask(nodes, name, identity(caller, folder), proves_itself=False) is unavailable
            assert await ask(nodes, name, identity(caller, stranger)) is unavailable
            mixed = identity(caller, _with_ca_of(folder, stranger, tmp_path / name))
            assert await ask(nodes, name, mixed) is unavailable
            assert await ask(nodes, name, identity(caller, old)) is unavailable
            assert await ask(nodes, name, identity(caller, None)) is unavailable
            assert await ask(nodes, name, identity(caller, folder, token="")) in unread
            assert await ask(nodes, name, identity(caller, folder, token="another")) in unread
            for role in set(roles) - {caller}:
                assert await ask(nodes, name, identity(role, folder)) is denied
            let_in = await ask(nodes, name, identity(caller, folder))
            assert (let_in is unavailable) == (name in ("Handoff", "Connect"))  # there is no such link, nor address
            assert let_in is not denied
        refused = nodes.decode.shell.guard.refused + nodes.prefill.shell.guard.refused
        assert refused == 5 * len(RPCS)
        lines = [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]
        assert min(refused, 2 * LINES_PER_MINUTE) <= len(lines) <= refused  # each node's, so many of an address
        assert sum("admin: it is for prefill, not for admin" in line and "/Pair'" in line for line in lines) == 1
        assert SECRET.call_token not in caplog.text
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)
        await nodes.wait_for_release()


def _with_ca_of(folder: TlsFolder, other: TlsFolder, into: Path) -> TlsFolder:
    """Trusts the servers of ``folder``, and shows certificates of ``other``."""
    shutil.copytree(other.path, into)
    shutil.copy(folder.path / "ca.pem", into / "ca.pem")
    return TlsFolder(into)


async def test_without_certificates_the_token_keeps_strangers_out() -> None:
    async with secured(None) as nodes:
        for name, (_, caller) in RPCS.items():
            assert await ask(nodes, name, identity(caller, None, token="")) is grpc.StatusCode.PERMISSION_DENIED
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)


async def test_a_stranger_is_refused_before_its_message_is_read() -> None:
    """It sends none. Mutant: the message, of 64 MiB at most, is taken in first."""
    services = {"decode": "DecodeNode", "prefill": "PrefillNode"}
    async with secured(None) as nodes:
        addresses = {"decode": nodes.decode_address, "prefill": nodes.prefill.shell.load().address}
        for name, (server, _) in RPCS.items():
            async with grpc.aio.insecure_channel(addresses[server]) as channel:
                opened: Any = channel
                call = opened.stream_stream(f"/paceline.v1.{services[server]}/{name.rpartition(' ')[2]}")()
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    assert await call.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_prefill_node_delivers_what_a_router_gave_to_it_alone(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The poisoning of a tenant's pages by a prefill node with a valid certificate: a ticket of another tenant's, of
    another node's, without a grant. Mutants: `Permits.check` returns; the node's own name is its address."""
    tls = make_folder(tmp_path / "a") if encrypted else None
    router = Grants(SECRET.ticket_key)
    forged: dict[str, Callable[[str], bytes]] = {
        "no grant": lambda ticket: b"",
        "a grant without the key": lambda ticket: Grants("?").sign(ticket, "prefill-0", "decode-0", "acme", 60.0),
        "another node's": lambda ticket: router.sign(ticket, "prefill-1", "decode-0", "acme", 60.0),
        "another tenant's": lambda ticket: router.sign(ticket, "prefill-0", "decode-0", "evil", 60.0),
        "another ticket's": lambda ticket: router.sign(f"{ticket}0", "prefill-0", "decode-0", "acme", 60.0),
        "one that is over": lambda ticket: router.sign(ticket, "prefill-0", "decode-0", "acme", -1e5),
    }
    ends: asyncio.Queue[str] = asyncio.Queue()
    end = ControlStream._end

    def noted(control: ControlStream, reason: str) -> None:
        ends.put_nowait(reason)
        end(control, reason)

    monkeypatch.setattr(ControlStream, "_end", noted)
    async with secured(tls) as nodes:
        for make in forged.values():
            request = sequence_request(cache_salt="acme")
            decode = nodes.open_decode(request)
            reserved = (await anext(aiter(decode))).reserved
            link = await nodes.prefill._links.get(nodes.decode_address)
            link.begin(reserved.ticket, range(len(request.prompt_token_ids)), make(reserved.ticket))
            ended = await asyncio.wait_for(ends.get(), CALL_TIMEOUT_S)
            assert ended.startswith("control stream broke: StatusCode.PERMISSION_DENIED")
            decode.cancel()
            await nodes.wait_for_release()
        assert nodes.decode.counts()["refused_calls"] == len(forged)
        told = [line for line in caplog.messages if "hand-off on link" in line]
        assert [line.split()[0] for line in told] == ["peer=127.0.0.1"] * len(forged)
        again = sequence_request(cache_salt="acme")
        assert (await nodes.generate(again)).output == expected_output(again)
        await nodes.wait_for_release()


async def test_new_certificates_are_taken_up_without_a_restart(tmp_path: Path) -> None:
    """Mutant: `node_credentials` reads its files once."""
    folder = make_folder(tmp_path / "a")
    async with secured(folder) as nodes:
        assert await ask(nodes, "Status", identity("router", folder)) is grpc.StatusCode.OK
        successor = make_folder(tmp_path / "b")
        for file in successor.path.iterdir():
            shutil.copy(file, folder.path / file.name)
        assert await ask(nodes, "Status", identity("router", successor)) is grpc.StatusCode.OK
        old = make_folder(tmp_path / "c")
        assert await ask(nodes, "Status", identity("router", old)) is grpc.StatusCode.UNAVAILABLE
        (folder.path / "decode.pem").write_text("half a file")  # stays as it was
        assert await ask(nodes, "Status", identity("router", successor)) is grpc.StatusCode.OK


async def test_a_router_goes_over_to_its_new_certificate_while_its_streams_go_on(tmp_path: Path) -> None:
    """Its files are replaced one after the other, while calls go on. Mutants: `NodeCalls` keeps a channel for as long
    as the node lives; a call fails for a file that is half written; what was made of files that do not fit is waited
    for."""
    folder, other = make_folder(tmp_path / "a"), make_folder(tmp_path / "b")
    async with secured(folder) as nodes:
        calls = NodeCalls(identity=identity("router", folder))
        node = NodeRecord("decode-0", "decode", 1, nodes.decode_address)

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(5):
                while not condition():
                    await asyncio.sleep(0.005)

        await until(lambda: calls.connected(node))
        shutil.copy(folder.path / "router.pem", tmp_path / "kept.pem")
        request = sequence_request(max_tokens=40)
        message = node_pb2.DecodeRequest(sequence=sequence_to_proto(request), local_prefill=True)
        stream, old = calls.decode(node, message, 10.0), calls._lines[node.address]
        assert (await stream.next()) is not None
        for half in (b"", (other.path / "router.pem").read_bytes()):  # which is not of this key
            (folder.path / "router.pem").write_bytes(half)
            assert calls.connected(node)
            assert calls._lines[node.address] is old
        shutil.copy(tmp_path / "kept.pem", folder.path / "router.pem")
        certificates.renew(folder.path, 1)
        connected: list[bool] = []

        def renewed() -> bool:
            connected.append(calls.connected(node))
            return calls._lines[node.address] is not old

        await until(renewed)
        assert all(connected)
        got: list[int] = []
        while (event := await stream.next()) is not None:
            got += event.tokens.token_ids
        assert got == expected_output(request)
        stream.close()
        await calls.prune({node.address})
        assert old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        await calls.close()


def test_a_router_whose_certificate_is_over_says_so_before_it_joins(tmp_path: Path) -> None:
    """Mutant: it opens, and every node ends its handshakes."""
    folder = make_folder(tmp_path / "a")
    identity("router", folder).check()
    with pytest.raises(ConfigError, match=r"^tls_dir: router\.pem of .*valid from .*paceline certs renew"):
        identity("router", expired(folder, tmp_path / "b")).check()
