"""The API key of a command: in a file, since whoever lists processes sees their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import ConfigError

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
