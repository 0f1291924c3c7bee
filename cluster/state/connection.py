"""How every part talks to Redis: each operation has a deadline, and one retry on a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from paceline.errors import ConfigError

T = TypeVar("T")

OPERATION_TIMEOUT_S = 1.0
RETRIES = 1  # at once: a pooled connection may have died with an earlier server; callers come again by themselves
JOIN_TIMEOUT_S = 2 * OPERATION_TIMEOUT_S * (1 + RETRIES)  # connect and answer, each try

_PASSING = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.ClusterDownError, OSError)
_REFUSED = (redis.AuthenticationError, redis.exceptions.AuthorizationError)  # which are ConnectionErrors too


def connect(url: str) -> redis.Redis:
    """A client for threads. It connects at its first operation; operations raise redis.RedisError."""
    return redis.Redis.from_url(
        url,
        socket_timeout=OPERATION_TIMEOUT_S,
        socket_connect_timeout=OPERATION_TIMEOUT_S,
        retry=Retry(NoBackoff(), RETRIES),
    )


def check_url(option: str, url: str) -> None:
    """Raises ConfigError naming ``option`` for what is no URL of a Redis; never repeats it: it may have a password."""
    try:
        redis.Redis.from_url(url).close()
    except ValueError:
        raise ConfigError(option, "is no URL of a Redis: redis://, rediss:// or unix://, then where it is") from None


def connect_async(url: str, timeout_s: float = OPERATION_TIMEOUT_S, retries: int = RETRIES) -> Any:
    """The same for an event loop (redis.asyncio.Redis, whose types are of little use)."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=redis.asyncio.retry.Retry(NoBackoff(), retries),
    )


def may_pass(error: Exception) -> bool:
    """Whether Redis may answer the same operation later: it was not reached, was late, or starts or fails over."""
    return isinstance(error, _PASSING) and not isinstance(error, _REFUSED)


async def answer_within(timeout_s: float, operation: Coroutine[Any, Any, T]) -> T:
    """What ``operation`` answers. Raises what it raises, and TimeoutError after ``timeout_s``. The wait does not rest
    on a cancellation alone, which redis-py was seen to swallow."""
    task = asyncio.create_task(operation)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError(f"Redis did not answer within {timeout_s:.2g} s")
    return task.result()
