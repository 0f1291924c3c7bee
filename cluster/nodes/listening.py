"""The addresses that a deployment listens at: what is none, or is taken, is said before anything is started for it."""

from __future__ import annotations

import socket

from paceline.config import ServeConfig
from paceline.errors import ConfigError

OPTIONS = ("grpc", "http", "admin")
BACKLOG = 512


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, which ``check_addresses`` has seen, as (host, port)."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def check_addresses(config: ServeConfig) -> None:
    """Every address is HOST:PORT; only ``admin`` may be empty. Raises ConfigError."""
    for key in OPTIONS:
        address: str = getattr(config, key)
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit()) and (address or key != "admin"):
            raise ConfigError(key, f"{address!r} is not HOST:PORT")


def check_free(config: ServeConfig) -> None:
    """Every address can be listened at now, and no two are one; it may still be taken a moment later.

    Raises ConfigError.
    """
    held: list[socket.socket] = []
    try:
        for key in OPTIONS:
            if address := getattr(config, key):
                held.append(listen(key, *split_address(address)))
    finally:
        for one in held:
            one.close()


def listen(key: str, host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. ``key``: the option to name. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(key, f"cannot listen at {host}:{port} (port 0 takes a free one): {error}") from None
