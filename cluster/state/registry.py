"""Who is alive: leases in Redis.

A node's record lives under a key that expires; its LeaseKeeper writes it again every quarter of the lease, but only
while the node's engine loop ticks, so that a stopped or wedged process loses its lease like a dead one. Generations
fence: once generation g of a node was seen, a lower one is refused. Routers poll the records into a view that they keep
when Redis goes away (docs/internals/failures.md#the-failure-table).

Keys, all under the namespace: ``node:{id}`` record, ``nodes`` set of ids, ``generation:{id}`` highest seen, ``epoch``
a random mark that is gone when Redis lost its data.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster.state.registry_types import NodeRecord

log = logging.getLogger(__name__)

GENERATION_TTL_S = 86_400  # how long a dead node's generation still fences
OPERATION_TIMEOUT_S = 1.0
RETRIES = 1  # at once: a pooled connection may have died with an earlier server; the next renewal is the backoff
REFRESHES_PER_LEASE = 4
JOIN_TIMEOUT_S = 2 * OPERATION_TIMEOUT_S * (1 + RETRIES)  # connect and answer, each try

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
# KEYS: set of ids, epoch. ARGV: prefix of record keys, epoch to set where there is none. Returns epoch, then id and
# record of each live node. In one script: an id is forgotten only while its record is really gone.
_READ = """
if redis.call('EXISTS', KEYS[2]) == 0 then redis.call('SET', KEYS[2], ARGV[2]) end
local answer = {redis.call('GET', KEYS[2])}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('GET', ARGV[1] .. id)
  if record then
    answer[#answer + 1] = id
    answer[#answer + 1] = record
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return answer
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
        load: Callable[[], Mapping[str, Any]],
        namespace: str = "paceline",
        on_fenced: Callable[[], None] = lambda: None,
    ) -> None:
        """alive: whether the engine loop ticked lately; load: see ``NodeRecord.with_load``; on_fenced: called once,
        from the keeper's thread, when a newer generation took over."""
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=OPERATION_TIMEOUT_S,
            socket_connect_timeout=OPERATION_TIMEOUT_S,
            retry=Retry(NoBackoff(), RETRIES),
        )
        self._record, self._ttl_s, self._alive, self._load = record, lease_ttl_s, alive, load
        self._namespace, self._on_fenced = namespace, on_fenced
        self._stop = threading.Event()
        self._writing = threading.Lock()  # one write at a time, so that none carries a state older than the last
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._trouble = ""
        self.fenced = False

    def start(self) -> None:
        """Write the record, then keep it. Raises Fenced, or redis.RedisError when Redis cannot be reached."""
        self.write()
        self._thread.start()

    def write(self) -> None:
        """Write the record once. Raises Fenced or redis.RedisError."""
        prefix = self._namespace
        with self._writing:
            record = self._record.with_load(self._load())
            keys = [f"{prefix}:node:{record.id}", f"{prefix}:nodes", f"{prefix}:generation:{record.id}"]
            ttl_ms = int(self._ttl_s * 1000)
            arguments: list[str | int] = [record.to_json(), record.generation, ttl_ms, record.id, GENERATION_TTL_S]
            written = self._client.eval(_WRITE, len(keys), *keys, *arguments)
        if not written:
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
            try:
                self._report(self._renew())
            except Fenced:
                log.error("%s generation %d is fenced off", self._record.id, self._record.generation)
                self._on_fenced()
                return
            except Exception as error:  # whatever a node's heartbeat raises: it is not alive
                self._report(f"the heartbeat failed: {error!r}")

    def _renew(self) -> str:
        """Returns what kept the lease from being renewed, or nothing."""
        if not self._alive():
            return "the engine loop does not tick"
        if self._stop.is_set():  # closed meanwhile: the record must not come back
            return ""
        try:
            self.write()
        except redis.RedisError as error:
            return f"Redis: {error}"
        return ""

    def _report(self, trouble: str) -> None:
        """Log changes only: a renewal comes several times a second."""
        if trouble and not self._trouble:
            log.warning("%s: lease not renewed: %s", self._record.id, trouble)
        elif self._trouble and not trouble:
            log.info("%s: lease renewed again", self._record.id)
        self._trouble = trouble

    def close(self) -> None:
        """Stop renewing and remove the record. Idempotent; at most a few seconds without Redis."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_TIMEOUT_S)
        key = f"{self._namespace}:node:{self._record.id}"
        try:
            self._client.eval(_REMOVE, 1, key, self._record.generation)
        except redis.RedisError as error:
            log.warning("record of %s not removed, its lease will expire: %s", self._record.id, error)
        self._client.close()


class NodeDirectory:
    """The router's view of the live nodes, refreshed by a task.

    The view changes only on Redis's word. While Redis is away it stays as it is; and for one lease after an outage, or
    after Redis came back empty, a node that is missing stays too: it had no way to renew.
    """

    def __init__(self, url: str, lease_ttl_s: float, namespace: str = "paceline") -> None:
        self._client: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=OPERATION_TIMEOUT_S,
            socket_connect_timeout=OPERATION_TIMEOUT_S,
            retry=redis.asyncio.retry.Retry(NoBackoff(), RETRIES),
        )
        self._ttl_s = lease_ttl_s
        self._namespace = namespace
        self._view: dict[str, NodeRecord] = {}
        self._seen_at = time.monotonic()
        self._epoch: bytes | None = None  # of the data that the view was read from; None after an outage
        self._keep_until = -math.inf  # until then a missing node stays in the view
        self._reachable = True
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._listeners: list[Callable[[list[NodeRecord]], None]] = []

    def nodes(self) -> list[NodeRecord]:
        """Live nodes by id; the last view when Redis is away."""
        return [self._view[key] for key in sorted(self._view)]

    def holds(self, node_id: str, generation: int) -> bool:
        """Whether this generation of the node has its lease."""
        record = self._view.get(node_id)
        return record is not None and record.generation == generation

    @property
    def stale_for_s(self) -> float:
        """Seconds since Redis last answered."""
        return time.monotonic() - self._seen_at

    def on_change(self, listener: Callable[[list[NodeRecord]], None]) -> None:
        """Call ``listener`` with the view whenever nodes join, leave, move or drain."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Read once, then keep reading."""
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="node-directory")

    async def refresh(self) -> None:
        """Read the records now; on failure keep the view."""
        try:
            epoch, found = await self._read()
        except (redis.RedisError, OSError, TimeoutError) as error:
            if self._reachable:
                log.warning("Redis is unreachable, keeping %d nodes: %s", len(self._view), error)
            self._reachable, self._epoch = False, None
            return
        now = time.monotonic()
        if not self._reachable:
            log.warning("Redis answers again after %.1f s", self.stale_for_s)
        if self._view and epoch != self._epoch:
            self._keep_until = now + self._ttl_s
        self._seen_at, self._reachable, self._epoch = now, True, epoch
        self._show(_merge(self._view, found) if now < self._keep_until else found)

    def _show(self, view: dict[str, NodeRecord]) -> None:
        changed = _identity(view) != _identity(self._view)
        self._view = view
        if not changed:
            return
        for listener in self._listeners:
            try:
                listener(self.nodes())
            except Exception:  # one listener's fault must not blind the router
                log.exception("a listener of the node directory failed")

    async def _read(self) -> tuple[bytes, dict[str, NodeRecord]]:
        prefix = self._namespace
        epoch, *rest = await self._client.eval(
            _READ, 2, f"{prefix}:nodes", f"{prefix}:epoch", f"{prefix}:node:", uuid.uuid4().hex
        )
        found: dict[str, NodeRecord] = {}
        for key, body in zip(rest[::2], rest[1::2], strict=True):
            try:
                found[key.decode()] = NodeRecord.from_json(body)
            except ValueError as error:
                log.warning("the record of node %r cannot be read: %s", key, error)
        return epoch, found

    async def _poll(self) -> None:
        while not self._closing:
            await asyncio.sleep(self._ttl_s / REFRESHES_PER_LEASE)
            await self.refresh()

    async def close(self) -> None:
        """Stop reading. Idempotent, and bounded without Redis."""
        self._closing = True  # redis-py was seen to swallow a cancellation: the loop must end without it too
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=JOIN_TIMEOUT_S)
            self._task = None
        await self._client.aclose()


def _identity(view: Mapping[str, NodeRecord]) -> list[tuple[str, int, str, str]]:
    return sorted((r.id, r.generation, r.address, r.state) for r in view.values())


def _merge(old: Mapping[str, NodeRecord], new: Mapping[str, NodeRecord]) -> dict[str, NodeRecord]:
    """What is new, and what is missing from it. A Redis that lost its data lost its fences too: between two
    generations the higher one stays."""
    merged = dict(old)
    for node_id, record in new.items():
        if node_id not in old or record.generation >= old[node_id].generation:
            merged[node_id] = record
    return merged
