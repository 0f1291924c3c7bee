"""``paceline role``: a node of a running deployment changes sides."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.commands.reach import ApiKeyFile, key_in

if TYPE_CHECKING:
    import grpc

START_TIMEOUT_S = 600.0  # it drains, then loads the model


def role(
    node_id: Annotated[
        str, typer.Argument(help="Id of the node, e.g. prefill-1. The log of serve at --log-level info names them.")
    ],
    to: Annotated[str, typer.Argument(help="The role to take: prefill or decode.")],
    admin: Annotated[str, typer.Option(help="HOST:PORT that the deployment was given as --admin.")] = "127.0.0.1:50052",
    tls_dir: Annotated[
        Path | None, typer.Option(help="Folder with ca.pem, admin.pem and admin.key, where the deployment has one.")
    ] = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Let a node finish its work, then start it again in another role. Requests go on meanwhile."""
    import grpc

    from paceline.client.channel import key_metadata
    from paceline.errors import NodeUnavailable
    from paceline.v1 import admin_pb2, admin_pb2_grpc

    with _channel(admin, tls_dir) as channel:
        try:
            request = admin_pb2.SetRoleRequest(node_id=node_id, role=to)
            done = admin_pb2_grpc.AdminStub(channel).SetRole(
                request, timeout=START_TIMEOUT_S, metadata=key_metadata(key_in(api_key_file))
            )
        except grpc.RpcError as error:
            raise NodeUnavailable(f"{admin}: {error.details()}") from None
    typer.echo(f"{done.node_id} serves {done.role} at {done.address}, generation {done.generation}")


def _channel(admin: str, tls_dir: Path | None) -> grpc.Channel:
    import grpc

    from paceline.rpc.tls import TlsFolder, role_name

    if tls_dir is None:
        return grpc.insecure_channel(admin)
    named = [("grpc.ssl_target_name_override", role_name("router"))]
    return grpc.secure_channel(admin, TlsFolder(tls_dir).channel_credentials("admin"), options=named)
