"""Channel options of both clients."""

from __future__ import annotations

import os
from typing import Any

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
