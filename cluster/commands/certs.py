"""``paceline certs``: the certificates of a deployment's parts."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError

certs = typer.Typer(help="Certificates of a deployment's parts, for --tls-dir.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder that --tls-dir names.")]
Days = Annotated[int, typer.Option(min=1, max=3650, help="Days that the certificates are valid.")]
DEFAULT_DAYS = 365


@certs.callback()
def _needs_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("certs", "the package cryptography is not installed; pip install 'paceline[node]'") from None


@certs.command()
def init(
    folder: Folder,
    hosts: Annotated[
        str, typer.Option(help="Names and addresses that clients reach the router at, separated by commas.")
    ] = "",
    days: Days = DEFAULT_DAYS,
    deployment: Annotated[str, typer.Option(help="Name of the deployment, which the certificates carry.")] = "default",
) -> None:
    """Make a CA of this deployment's own, and certificates for router, nodes, operators and clients' side."""
    from cluster.commands.certificates import init as make

    reached_at = [host for item in hosts.split(",") if (host := item.strip())]
    make(folder, deployment, reached_at or ["localhost", socket.gethostname(), "127.0.0.1", "::1"], days)
    typer.echo(f"{folder}: keep ca.key elsewhere; a host needs ca.pem and the files of the roles that run on it")


@certs.command()
def renew(folder: Folder, days: Days = DEFAULT_DAYS) -> None:
    """Sign the certificates anew, for the same names and keys. Running parts take them up without a restart."""
    from cluster.commands.certificates import renew as make

    typer.echo(f"renewed {', '.join(make(folder, days))}")


@certs.command()
def show(folder: Folder) -> None:
    """List the certificates, and the days that they are still valid."""
    from cluster.commands.certificates import show as found

    for one in found(folder):
        left = f"{one.days_left} days left" if one.days_left >= 0 else "OVER"
        typer.echo(f"{one.file:12} {one.whom:28} until {one.until:%Y-%m-%d}  {left}")
