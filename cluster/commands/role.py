"""``paceline role``: a node of a running deployment changes sides."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.commands.reach import Admin, AdminTls, ApiKeyFile, admin_channel, key_in

START_TIMEOUT_S = 600.0  # it drains, then loads the model


def role(
    node_id: Annotated[str, typer.Argument(help="Id of the node, e.g. prefill-1. `paceline nodes list` has them.")],
    to: Annotated[str, typer.Argument(help="The role to take: prefill or decode.")],
    admin: Admin = "127.0.0.1:50052",
    tls_dir: AdminTls = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Let a node finish its work, then start it again in another role. Requests go on meanwhile."""
    import grpc

    from paceline.client.channel import key_metadata
    from paceline.errors import NodeUnavailable
    from paceline.v1 import admin_pb2, admin_pb2_grpc

    with admin_channel(admin, tls_dir) as channel:
        try:
            request = admin_pb2.SetRoleRequest(node_id=node_id, role=to)
            done = admin_pb2_grpc.AdminStub(channel).SetRole(
                request, timeout=START_TIMEOUT_S, metadata=key_metadata(key_in(api_key_file))
            )
        except grpc.RpcError as error:
            raise NodeUnavailable(f"{admin}: {error.details()}") from None
    typer.echo(f"{done.node_id} serves {done.role} at {done.address}, generation {done.generation}")
