"""The message of a gRPC call: while it arrives, and while its call holds it.

gRPC says how long a message is once all of it is there, and takes in as much as the largest may have. So messages that
are not there at once are bounded in number, as if each were the largest. Those that are there count by their bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.frontdoor.held_bodies import SMALL_BYTES, Budget, HeldBodies, HeldBody
from paceline.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

MESSAGE_TIMEOUT_S = 30.0  # for the message of a call, from its headers
QUICK_S = 0.25  # a message that takes longer is slow
MOST_SLOW = 64  # of callers with a key, or where there are none: as many of 4 MiB as MAX_HELD_BYTES has room for
MOST_SLOW_OPEN = 8  # of what needs no key

Sized = tuple[int, Any]  # bytes of a message, and the message


def sized(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Sized]:
    """What reads a message, and tells its bytes."""
    return lambda data: (len(data), deserialize(data))


class Arriving:
    """Messages of all calls."""

    def __init__(self, bodies: HeldBodies) -> None:
        slow = "too many messages are on their way here"
        self._bodies, self._slow = bodies, {True: Budget(MOST_SLOW_OPEN, slow), False: Budget(MOST_SLOW, slow)}

    @contextmanager
    def body(self, owner: str) -> Iterator[HeldBody]:
        """What one call holds."""
        body = HeldBody(self._bodies, owner)
        try:
            yield body
        finally:
            body.release()

    async def read(self, requests: AsyncIterator[Sized], body: HeldBody, *, is_open: bool) -> Any:
        """The one message of a call, which ``body`` holds from then on. is_open: the call needs no key, and a small
        message. Raises DeadlineExceeded, Overloaded, InvalidRequest for a message that is too large, NodeUnavailable
        when the client leaves without one."""
        reading = asyncio.ensure_future(_first(requests))
        try:
            await asyncio.wait({reading}, timeout=QUICK_S)
            if not reading.done():
                with self._slow[is_open].taken(body.owner, 1):
                    await asyncio.wait({reading}, timeout=MESSAGE_TIMEOUT_S - QUICK_S)
            if not reading.done():
                raise DeadlineExceeded(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s")
            size, message = reading.result()
        finally:
            reading.cancel()
        if is_open and size > SMALL_BYTES:
            raise InvalidRequest("request", f"has {size} bytes, more than {SMALL_BYTES}")
        body.grow(size)
        return message


async def _first(requests: AsyncIterator[Sized]) -> Sized:
    try:
        return await anext(requests)
    except StopAsyncIteration:
        raise NodeUnavailable("the call ended without a message") from None
