"""How a command reaches a router: TLS, and the API key, in a file since whoever lists processes sees arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError

UseTls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, and check the router with the system's roots.")]
TlsCa = Annotated[Path | None, typer.Option(help="Connect with TLS, and check the router with the CA in this file.")]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the API key, where the deployment has keys. Without it PACELINE_API_KEY counts."),
]


def key_in(file: Path | None) -> str | None:
    """The key in ``file``; None without one. Raises ConfigError."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", str(error)) from None
