"""How every part talks to Redis: each operation has a deadline, and one retry on a new connection."""

from __future__ import annotations

from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

OPERATION_TIMEOUT_S = 1.0
RETRIES = 1  # at once: a pooled connection may have died with an earlier server; callers come again by themselves
JOIN_TIMEOUT_S = 2 * OPERATION_TIMEOUT_S * (1 + RETRIES)  # connect and answer, each try


def connect(url: str) -> redis.Redis:
    """A client for threads. It connects at its first operation; operations raise redis.RedisError."""
    return redis.Redis.from_url(
        url,
        socket_timeout=OPERATION_TIMEOUT_S,
        socket_connect_timeout=OPERATION_TIMEOUT_S,
        retry=Retry(NoBackoff(), RETRIES),
    )


def connect_async(url: str) -> Any:
    """The same for an event loop (redis.asyncio.Redis, whose types are of little use)."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=OPERATION_TIMEOUT_S,
        socket_connect_timeout=OPERATION_TIMEOUT_S,
        retry=redis.asyncio.retry.Retry(NoBackoff(), RETRIES),
    )
