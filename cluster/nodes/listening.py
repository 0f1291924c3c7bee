"""The addresses that a deployment listens at: what is none, or is taken, is said before anything is started for it."""

from __future__ import annotations

import ipaddress
import logging
import resource
import socket
from collections.abc import Iterable

from paceline.config import ServeConfig
from paceline.errors import ConfigError

log = logging.getLogger(__name__)

OPTIONS = ("grpc", "http", "admin")
BACKLOG = 512
MAX_OPEN_FILES = 65536


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, which ``check_addresses`` has seen, as (host, port)."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def check_addresses(config: ServeConfig) -> None:
    """Every address is HOST:PORT, and without API keys of this machine alone; only ``admin`` may be empty.

    Raises ConfigError.
    """
    reached = []
    for key in OPTIONS:
        address: str = getattr(config, key)
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit()) and (address or key != "admin"):
            raise ConfigError(key, f"{address!r} is not HOST:PORT")
        if address and not is_loopback(host) and not config.api_keys:
            if not config.insecure:
                text = (
                    f"{address} is reached by other hosts, and everybody there could use it: give api_keys, or insecure"
                )
                raise ConfigError(key, text)
            reached.append(f"{key} {address}")
    if reached:
        log.warning("INSECURE: %s let in everybody who reaches them, since there are no api_keys", ", ".join(reached))


def warn_of_clear_keys(config: ServeConfig, *, clients_tls: bool, parts_tls: bool) -> None:
    """Say where API keys cross a network unencrypted. clients_tls: ``grpc`` and ``http`` have TLS; parts_tls: ``admin``
    has."""
    clear = [key for key in OPTIONS if not (parts_tls if key == "admin" else clients_tls)]
    reached = [f"{key} {address}" for key in clear if (address := getattr(config, key)) and _is_reached(address)]
    if config.api_keys and reached:
        told = ", ".join(reached)
        log.warning("API keys and prompts cross the network in the clear: %s have no TLS (--tls-dir)", told)


def warn_of_clear_nodes(addresses: Iterable[str], *, parts_tls: bool) -> None:
    """Say which nodes other hosts reach without TLS. Only who has the deployment's secret is let in there."""
    reached = sorted(address for address in addresses if _is_reached(address))
    if reached and not parts_tls:
        told = ", ".join(reached)
        log.warning("prompts, answers and KV cross the network in the clear: nodes at %s have no TLS (--tls-dir)", told)


def _is_reached(address: str) -> bool:
    return not is_loopback(split_address(address)[0])


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches the host. A name other than localhost may be any address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


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


def raise_open_files() -> int:
    """Let this process open as many files as it may, at most MAX_OPEN_FILES. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft
