"""How a command reaches a router: TLS, and the API key, in a file since whoever lists processes sees arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.errors import ConfigError, Unauthenticated

if TYPE_CHECKING:
    import grpc

UseTls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, and check the router with the system's roots.")]
TlsCa = Annotated[Path | None, typer.Option(help="Connect with TLS, and check the router with the CA in this file.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the API key, where the deployment has keys. Without it PACELINE_API_KEY counts."),
]

Admin = Annotated[str, typer.Option(help="HOST:PORT that the deployment was given as --admin.")]
AdminTls = Annotated[
    Path | None, typer.Option(help="Folder with ca.pem, admin.pem and admin.key, where the deployment has one.")
]


def admin_channel(admin: str, tls_dir: Path | None) -> grpc.Channel:
    """To the operators' gRPC. Raises ConfigError."""
    import grpc

    from paceline.rpc.tls import TlsFolder, role_name

    if tls_dir is None:
        return grpc.insecure_channel(admin)
    named = [("grpc.ssl_target_name_override", role_name("router"))]
    return grpc.secure_channel(admin, TlsFolder(tls_dir).channel_credentials("admin"), options=named)


def key_in(file: Path | None) -> str | None:
    """The key in ``file``; None without one. Raises ConfigError."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(error)) from None


def next_step(error: Exception) -> str:
    """What to try after ``error`` of a command that asks a deployment; empty where its message says all."""
    if isinstance(error, Unauthenticated):
        return "; --api-key-file FILE or the variable PACELINE_API_KEY gives the key"
    if "failed to connect to all addresses" in str(error):  # gRPC's words
        return (
            "; is this the --grpc address of a running `paceline serve` (--admin for nodes and role)? With TLS it "
            "wants --tls-ca or --tls-dir too"
        )
    return ""
