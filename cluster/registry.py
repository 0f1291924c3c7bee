"""Who is alive: leases in Redis.

A node's record lives under a key that expires; its LeaseKeeper writes it again every quarter of the lease, but only
while the node's engine loop ticks, so that a stopped or wedged process loses its lease like a dead one. Generations
fence: once generation g of a node was seen, a lower one is refused. Routers poll the records into a view that they keep
when Redis goes away (design section 7).
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import redis
import redis.asyncio

from cluster.registry_types import NodeRecord

log = logging.getLogger(__name__)

GENERATION_TTL_S = 86_400  # how long a dead node's generation still fences
OPERATION_TIMEOUT_S = 1.0
REFRESHES_PER_LEASE = 4

# KEYS: record, set of ids, generation. ARGV: record JSON, generation, lease in ms, id, generation's lifetime in s.
_WRITE = """
local seen = tonumber(redis.call('GET', KEYS[3]) or '0')
if seen > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[3], ARGV[2], 'EX', ARGV[5])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[4])
return 1
"""
# KEYS: record. ARGV: generation. Only the holder's own generation is removed.
_REMOVE = """
local record = redis.call('GET', KEYS[1])
if record and cjson.decode(record)['generation'] == tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Fenced(Exception):
    """A newer generation of this node exists; this one must not serve."""


class LeaseKeeper:
    """Keeps one node's record alive from its own thread."""

    def __init__(
        self,
        url: str,
        record: NodeRecord,
        lease_ttl_s: float,
        alive: Callable[[], bool],
        load: Callable[[], Mapping[str, int]],
        namespace: str = "paceline",
    ) -> None:
        """alive: whether the engine loop ticked lately; load: running, waiting, free_pages, total_pages."""
        self._client = redis.Redis.from_url(
            url, socket_timeout=OPERATION_TIMEOUT_S, socket_connect_timeout=OPERATION_TIMEOUT_S
        )
        self._record, self._ttl_s, self._alive, self._load = record, lease_ttl_s, alive, load
        self._namespace = namespace
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.fenced = False

    def start(self) -> None:
        """Write the record, then keep it. Raises Fenced, or redis.RedisError when Redis cannot be reached."""
        self.write()
        self._thread.start()

    def write(self) -> None:
        """Write the record once."""
        record = replace(self._record, **self._load())
        prefix = self._namespace
        keys = [f"{prefix}:node:{record.id}", f"{prefix}:nodes", f"{prefix}:generation:{record.id}"]
        body, ttl_ms = json.dumps(asdict(record)), int(self._ttl_s * 1000)
        arguments = [body, record.generation, ttl_ms, record.id, GENERATION_TTL_S]
        if not self._client.eval(_WRITE, len(keys), *keys, *arguments):
            self.fenced = True
            raise Fenced(f"{record.id}: a generation above {record.generation} is registered")

    def drain(self) -> None:
        """Tell routers to send nothing new."""
        self._record = replace(self._record, state="draining")
        try:
            self.write()
        except (redis.RedisError, Fenced) as error:
            log.warning("could not mark %s as draining: %s", self._record.id, error)

    def _run(self) -> None:
        while not self._stop.wait(self._ttl_s / REFRESHES_PER_LEASE):
            if not self._alive():
                log.error("%s: the engine loop does not tick; the lease is left to expire", self._record.id)
                continue
            try:
                self.write()
            except Fenced:
                log.error("%s generation %d is fenced off", self._record.id, self._record.generation)
                return
            except redis.RedisError as error:
                log.warning("lease of %s not renewed: %s", self._record.id, error)

    def close(self) -> None:
        """Stop renewing and remove the record. Idempotent; at most a few seconds without Redis."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=OPERATION_TIMEOUT_S * 2)
        key = f"{self._namespace}:node:{self._record.id}"
        try:
            self._client.eval(_REMOVE, 1, key, self._record.generation)
        except redis.RedisError as error:
            log.warning("record of %s not removed, its lease will expire: %s", self._record.id, error)
        self._client.close()


class NodeDirectory:
    """The router's view of the live nodes, refreshed by a task."""

    def __init__(self, url: str, lease_ttl_s: float, namespace: str = "paceline") -> None:
        self._client: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=OPERATION_TIMEOUT_S, socket_connect_timeout=OPERATION_TIMEOUT_S
        )
        self._interval_s = lease_ttl_s / REFRESHES_PER_LEASE
        self._namespace = namespace
        self._view: dict[str, NodeRecord] = {}
        self._seen_at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[list[NodeRecord]], None]] = []

    def nodes(self) -> list[NodeRecord]:
        """Live nodes by id; the last view when Redis is away."""
        return [self._view[key] for key in sorted(self._view)]

    @property
    def stale_for_s(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._seen_at

    def on_change(self, listener: Callable[[list[NodeRecord]], None]) -> None:
        """Call ``listener`` with the view whenever nodes join or leave."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Read once, then keep reading."""
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="node-directory")

    async def refresh(self) -> None:
        """Read the records now; on failure keep the view."""
        try:
            found = await self._read()
        except (redis.RedisError, OSError, TimeoutError) as error:
            log.warning("Redis is unreachable for %.1f s, keeping %d nodes: %s", self.stale_for_s, len(self._view), error)
            return
        self._seen_at = time.monotonic()
        changed = _identity(found) != _identity(self._view)
        self._view = found
        if changed:
            for listener in self._listeners:
                listener(self.nodes())

    async def _read(self) -> dict[str, NodeRecord]:
        members = await self._client.smembers(f"{self._namespace}:nodes")
        ids = sorted(member.decode() for member in members)
        if not ids:
            return {}
        bodies = await self._client.mget([f"{self._namespace}:node:{node_id}" for node_id in ids])
        gone = [node_id for node_id, body in zip(ids, bodies, strict=True) if body is None]
        if gone:
            await self._client.srem(f"{self._namespace}:nodes", *gone)
        return {n: NodeRecord(**json.loads(b)) for n, b in zip(ids, bodies, strict=True) if b is not None}

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._client.aclose()


def _identity(view: Mapping[str, NodeRecord]) -> list[tuple[str, int, str, str]]:
    return sorted((r.id, r.generation, r.address, r.state) for r in view.values())
