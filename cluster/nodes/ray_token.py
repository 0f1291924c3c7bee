"""Ray's own token: whoever has it, and reaches a port of Ray's, may run code as the user that Ray runs as."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)


def keep_private() -> None:
    """Let nobody but its owner read the token's file: Ray writes it as the umask says. One that is somebody else's is
    left alone."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    with suppress(OSError):
        found = path.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o077:
            path.chmod(0o600)


def warn_where_open() -> None:
    """Say so where Ray asks for no token."""
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        log.warning("INSECURE: RAY_AUTH_MODE is disabled: whoever reaches a port of Ray's may run code on its hosts")
