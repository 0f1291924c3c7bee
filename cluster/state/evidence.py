"""What routers of a deployment tell each other through Redis: small sealed notes that expire.

``{namespace}:evidence`` is a sorted set of notes by the Unix time in ms at which they end. Each router adds its own and
reads all of them twice a second, in one pipeline. Nothing waits for Redis: notes that cannot be written stay in a
bounded line, and the newest ones give way. Bounds: notes in Redis, bytes of a note, seconds of life. The end of a note
is sealed with it, so whoever can write to Redis brings none back after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

import redis

from cluster.state.connection import JOIN_TIMEOUT_S, connect_async
from cluster.state.registry_types import DEFAULT_NAMESPACE
from cluster.state.sealing import NotSealed, Seal

log = logging.getLogger(__name__)

EVERY_S = 0.5
LIFE_S = 600.0
MAX_NOTES, MAX_WAITING = 1024, 64
MAX_NOTE_BYTES = 4096
END_BYTES = 8  # of a note: when it ends, Unix time in ms


class Evidence:
    """A router's side. ``start`` it on the event loop that uses it, ``close`` it."""

    def __init__(self, url: str, seal: Seal, hear: Callable[[bytes], None], namespace: str = DEFAULT_NAMESPACE) -> None:
        """hear: is called once with every note of any router that was sealed by this deployment, this router's too."""
        self._client = connect_async(url)
        self._seal, self._hear, self._key = seal, hear, f"{namespace}:evidence"
        self._waiting: deque[bytes] = deque()
        self._seen: set[bytes] = set()
        self._task: asyncio.Task[None] | None = None

    def tell(self, note: bytes) -> None:
        """Have all routers hear ``note`` soon. One that is too large, or for which there is no room, is dropped."""
        if len(note) <= MAX_NOTE_BYTES and len(self._waiting) < MAX_WAITING:
            end = _now_ms() + int(LIFE_S * 1000)
            self._waiting.append(self._seal.seal(self._key, end.to_bytes(END_BYTES, "big") + note))

    def start(self) -> None:
        """Begin to read and to write."""
        self._task = asyncio.create_task(self._run(), name="evidence")

    async def _run(self) -> None:
        while True:
            try:
                await self._exchange()
            except (redis.RedisError, OSError) as error:
                log.debug("routers tell each other nothing: %s", error)
            except Exception:  # a fault here must not end the exchange
                log.exception("what routers tell each other could not be read")
            await asyncio.sleep(EVERY_S)

    async def _exchange(self) -> None:
        now_ms, mine = _now_ms(), list(self._waiting)
        pipe = self._client.pipeline(transaction=False)
        if mine:
            pipe.zadd(self._key, {note: now_ms + int(LIFE_S * 1000) for note in mine})
            pipe.zremrangebyscore(self._key, "-inf", now_ms)
            pipe.zremrangebyrank(self._key, 0, -MAX_NOTES - 1)
            pipe.pexpire(self._key, int(LIFE_S * 1000))
        pipe.zrangebyscore(self._key, f"({now_ms}", "+inf", start=0, num=MAX_NOTES)
        *written, found = await pipe.execute(raise_on_error=False)
        if isinstance(found, Exception):
            raise found
        for _ in [] if any(isinstance(one, Exception) for one in written) else mine:  # a full Redis can be read
            self._waiting.popleft()
        for note in found:
            if note not in self._seen:
                self._open(note)
        self._seen = set(found)

    def _open(self, note: bytes) -> None:
        try:
            content = self._seal.open(self._key, note)
        except NotSealed as problem:
            log.warning("a note in %s is refused: it is %s", self._key, problem.reason)
            return
        left_ms = int.from_bytes(content[:END_BYTES], "big") - _now_ms()
        if 0 < left_ms <= 2 * LIFE_S * 1000:  # clocks of hosts may differ by a life
            self._hear(content[END_BYTES:])
        else:
            log.warning("a note in %s is refused: it has ended", self._key)

    async def close(self) -> None:
        """Stop. Idempotent, and bounded without Redis."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=JOIN_TIMEOUT_S)
            self._task = None
        await self._client.aclose()


def _now_ms() -> int:
    return int(time.time() * 1000)
