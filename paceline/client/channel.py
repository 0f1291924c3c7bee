"""Channels of both clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

# False: in the clear. True: the system's roots. A path: the CA's file. Credentials: as they are, e.g. with a client's.
Tls: TypeAlias = bool | str | PathLike[str] | grpc.ChannelCredentials

DEFAULT_TIMEOUT_S = 600.0
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it a ping may go unanswered for a minute
    # A router that came back must not wait for the back-off of its predecessor's death.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

# With several routers a silent one is left for another: a stopped process or a cut cable closes no connection.
FAILOVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 1_000),
    ("grpc.http2.ping_timeout_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),  # a stream may be silent for as long as a prompt is computed
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long one attempt to connect may take
)


def channel_options(routers: str | Sequence[str], options: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    """Those of each channel to ``routers``. options: over the SDK's own."""
    several = not isinstance(routers, str) and len(routers) > 1
    return tuple(
        {**dict(FAILOVER_OPTIONS if several else CHANNEL_OPTIONS), **dict(options)}.items()
    )  # gRPC: first wins


def _credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    """None: in the clear. OSError when the file of a CA cannot be read."""
    if isinstance(tls, bool):
        return grpc.ssl_channel_credentials() if tls else None
    if isinstance(tls, grpc.ChannelCredentials):
        return tls
    return grpc.ssl_channel_credentials(Path(tls).expanduser().read_bytes())


def open_channel(address: str, tls: Tls, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
    """To a router, with the ``options`` of ``channel_options``."""
    credentials = _credentials(tls)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def open_aio_channel(address: str, tls: Tls, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """The same for an event loop."""
    credentials = _credentials(tls)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


KEY_VARIABLE = "PACELINE_API_KEY"


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call sends; None takes the key in PACELINE_API_KEY, and no key where there is none. ValueError for a
    text that no header can hold; it does not repeat the text."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError("api_key: must be printable ASCII without spaces")
    return (("authorization", f"Bearer {key}"),)
