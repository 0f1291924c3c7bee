"""``paceline nodes``: nodes come and go while a deployment serves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.console import errors
from cluster.commands.reach import Admin, AdminTls, ApiKeyFile, admin_channel, key_in

if TYPE_CHECKING:
    from paceline.v1.admin_pb2 import AdminNode
    from paceline.v1.admin_pb2_grpc import AdminStub

app = typer.Typer(help="Nodes of a running deployment.", no_args_is_help=True)

ADMIN = "127.0.0.1:50052"
ASK_TIMEOUT_S = 10.0
MARGIN_S = 60.0  # past the grace of a drain: the process ends, or is killed
MOST_FAILURES = 3  # starts in a row of a node, after which an upgrade ends
MAX_AT_ONCE = 4  # nodes added side by side; the admin service takes 8 calls

NodeId = Annotated[str, typer.Argument(help="Id of the node, e.g. decode-1. `paceline nodes list` has them.")]
Grace = Annotated[
    float | None,
    typer.Option(min=0, help="Seconds that its streams get to end before they move; else the deployment's."),
]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait until it serves; it is started all the same.")]


@app.command("list")
def list_nodes(
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")] = False,
) -> None:
    """Print every node that is wanted: role, ranks, state, host, load, since when it runs, and its build."""
    with _calling(admin, tls_dir, api_key_file) as call:
        nodes = call.list()
    if as_json:
        typer.echo(json.dumps([_as_json(node) for node in nodes]))
    else:
        _print_table(nodes)


@app.command()
def add(
    role: Annotated[str, typer.Option(help="prefill or decode.")],
    count: Annotated[int, typer.Option(min=1, max=64, help="How many.")] = 1,
    host: Annotated[str, typer.Option(help="Address by which Ray knows the host for it; without it Ray chooses.")] = "",
    timeout: Timeout = 600.0,
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Start more nodes, with the deployment's options, and wait until they serve."""
    with _calling(admin, tls_dir, api_key_file) as call, ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        adding = [pool.submit(call.add, role, timeout, host) for _ in range(count)]
        for node in [future.result() for future in adding]:
            _tell_serves(node)


@app.command()
def drain(
    node_id: NodeId,
    grace: Grace = None,
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Let a node take no new work and end its streams or move them, then end its process. It keeps its place."""
    with _calling(admin, tls_dir, api_key_file) as call:
        call.drain(node_id, grace)
    typer.echo(f"{node_id} is drained; `paceline nodes start {node_id}` starts it again")


@app.command()
def start(
    node_id: NodeId,
    timeout: Timeout = 600.0,
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Start a node that was drained, and wait until it serves."""
    with _calling(admin, tls_dir, api_key_file) as call:
        _tell_serves(call.start(node_id, timeout))


@app.command()
def remove(
    node_id: NodeId,
    grace: Grace = None,
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Drain a node, end its process, and do not replace it."""
    with _calling(admin, tls_dir, api_key_file) as call:
        call.remove(node_id, grace)
    typer.echo(f"{node_id} is removed")


@app.command()
def upgrade(
    grace: Grace = None,
    timeout: Timeout = 600.0,
    admin: Admin = ADMIN,
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Start every node anew, one after the other, from what is installed on its host now. Streams go on meanwhile. It
    ends at the first node that fails to start three times in a row, or does not come back in time."""
    with _calling(admin, tls_dir, api_key_file) as call:
        nodes = [node for node in call.list() if node.state not in ("drained", "draining", "removing")]
        helper = None
        if sum(node.role == "decode" for node in nodes) == 1:
            helper = call.add("decode", timeout, most_failures=MOST_FAILURES)
        for old in nodes:
            new = call.renew(old.node_id, grace, timeout)
            was, now = f"generation {old.generation}, build {old.build}", f"{new.generation}, {new.build}"
            typer.echo(f"{old.node_id} ({was}) is {now}")
        if helper is not None:
            call.remove(helper.node_id, grace)


class Calls:
    """Calls to the operators' gRPC, which raise NodeUnavailable with what it said."""

    def __init__(self, stub: AdminStub, admin: str, metadata: Any) -> None:
        self._stub, self._admin, self._metadata = stub, admin, metadata

    def list(self) -> list[AdminNode]:
        """Every node that is wanted."""
        from paceline.v1 import admin_pb2

        with self._told():
            request = admin_pb2.ListNodesRequest()
            return list(self._stub.ListNodes(request, timeout=ASK_TIMEOUT_S, metadata=self._metadata).nodes)

    def add(self, role: str, timeout_s: float, host: str = "", most_failures: int = 0) -> AdminNode:
        """One more node, which serves. most_failures: starts in a row that fail until nobody waits any more; 0: any
        number."""
        from paceline.v1 import admin_pb2

        request = admin_pb2.AddNodeRequest(role=role, host=host, most_failures=most_failures)
        return self._follow(self._stub.AddNode, request, timeout_s)

    def drain(self, node_id: str, grace: float | None) -> None:
        """Until its process has ended."""
        from paceline.v1 import admin_pb2

        request = admin_pb2.DrainNodeRequest(node_id=node_id, grace_s=grace)
        self._follow(self._stub.DrainNode, request, _drain_timeout(grace))

    def start(self, node_id: str, timeout_s: float, most_failures: int = 0) -> AdminNode:
        """Until it serves. most_failures: as of ``add``."""
        from paceline.v1 import admin_pb2

        request = admin_pb2.StartNodeRequest(node_id=node_id, most_failures=most_failures)
        return self._follow(self._stub.StartNode, request, timeout_s)

    def remove(self, node_id: str, grace: float | None) -> None:
        """Until it is gone."""
        from paceline.v1 import admin_pb2

        request = admin_pb2.RemoveNodeRequest(node_id=node_id, grace_s=grace)
        self._follow(self._stub.RemoveNode, request, _drain_timeout(grace))

    def renew(self, node_id: str, grace: float | None, timeout_s: float) -> AdminNode:
        """A new process in a node's place."""
        self.drain(node_id, grace)
        return self.start(node_id, timeout_s, MOST_FAILURES)

    def _follow(self, change: Callable[..., Any], request: Any, timeout_s: float) -> AdminNode:
        """Make a change, and print what its node is at on stderr until it is over. Returns the node then."""
        last: AdminNode | None = None
        with self._told(lambda: "" if last is None else f"; {last.node_id} is {last.state}: {last.detail}"):
            for told in change(request, timeout=timeout_s, metadata=self._metadata):
                if last is None or _line(told.node) != _line(last):
                    errors.print(_line(told.node), soft_wrap=True, markup=False)
                last = told.node
        if last is None:
            raise _unavailable(self._admin, "it said nothing")
        return last

    @contextmanager
    def _told(self, where: Callable[[], str] = lambda: "") -> Iterator[None]:
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            raise _unavailable(self._admin, f"{error.details()}{where()}") from None


@contextmanager
def _calling(admin: str, tls_dir: Path | None, api_key_file: Path | None) -> Iterator[Calls]:
    from paceline.client.channel import key_metadata
    from paceline.v1 import admin_pb2_grpc

    with admin_channel(admin, tls_dir) as channel:
        yield Calls(admin_pb2_grpc.AdminStub(channel), admin, key_metadata(key_in(api_key_file)))


def _unavailable(admin: str, said: str) -> Exception:
    from paceline.errors import NodeUnavailable

    return NodeUnavailable(f"{admin}: {said}")


def _drain_timeout(grace: float | None) -> float:
    """Without a grace the deployment's counts, which is not known here."""
    return 24 * 3600.0 if grace is None else grace + MARGIN_S


def _tell_serves(node: AdminNode) -> None:
    typer.echo(f"{node.node_id} serves {node.role} at {node.address}, generation {node.generation}")


def _line(node: AdminNode) -> str:
    """What somebody who waits wants to know."""
    load = f", {node.running} running, {node.waiting} waiting" if node.state in ("draining", "removing") else ""
    detail = f": {node.detail}" if node.detail else ""
    return f"{node.node_id} is {node.state}{load}{detail}"


def _as_json(node: AdminNode) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict

    shown: dict[str, Any] = MessageToDict(
        node, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return shown | {"generation": node.generation}  # protobuf writes 64 bits as text


def _print_table(nodes: list[AdminNode]) -> None:
    from rich.console import Console
    from rich.table import Table

    load = ("running", "free pages", "since", "build")
    table = Table("node", "role", "ranks", "state", "generation", "address", "host", *load)
    for node in nodes:
        since = f"{datetime.fromtimestamp(node.since, UTC):%Y-%m-%d %H:%M:%S}" if node.since else ""
        pages = f"{node.free_pages}/{node.total_pages}" if node.total_pages else ""
        state = f"{node.state}: {node.detail}" if node.detail else node.state
        cells = (node.node_id, node.role, str(node.ranks or ""), state, str(node.generation), node.address, node.host)
        table.add_row(*cells, str(node.running), pages, since, node.build)
    Console(width=None if Console().is_terminal else 200, markup=False).print(table)
