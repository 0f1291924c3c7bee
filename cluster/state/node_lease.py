"""A node's lease: its record in Redis, written again every quarter of the lease while the engine loop ticks.

A stopped or wedged process therefore loses its lease like a dead one. Generations fence: once generation g of a node
was issued or registered, a lower one is refused.

The keys are those of ``cluster.state.registry``. None of them has an expiry of Redis' own: a lease says itself until
when it holds, by the clock of the Redis server. Redis may therefore evict cached prefixes and journal entries when its
memory is full (policies ``volatile-*``), and never a lease.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import redis

from cluster.state.connection import JOIN_TIMEOUT_S, connect
from cluster.state.registry_types import DEFAULT_NAMESPACE, NodeRecord

log = logging.getLogger(__name__)

REFRESHES_PER_LEASE = 4
NOW_MS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
# KEYS: records, leases, generations, epoch, holder, a mark of routers. ARGV: record JSON, generation, lease in ms, id,
# epoch where there is none. Returns 0 to a node that has a successor; else 2 where a supervisor or a router is, or 1.
_WRITE = f"""
local seen = tonumber(redis.call('HGET', KEYS[3], ARGV[4]) or '0') or 0
if seen > tonumber(ARGV[2]) then return 0 end
{NOW_MS}
redis.call('SETNX', KEYS[4], ARGV[5])
redis.call('HSET', KEYS[3], ARGV[4], ARGV[2])
redis.call('HSET', KEYS[1], ARGV[4], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[4], now + ARGV[3])
local ends = tonumber(redis.call('HGET', KEYS[5], 'ends') or '0') or 0
return (ends > now or redis.call('EXISTS', KEYS[6]) == 1) and 2 or 1
"""
# KEYS: records, leases, generations. ARGV: id, generation. A successor's record is left alone.
_REMOVE = """
local seen = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0') or 0
if seen > tonumber(ARGV[2]) then return 0 end
redis.call('HDEL', KEYS[2], ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
"""


class Fenced(Exception):
    """A newer generation of this node exists; this one must not serve."""


def keys_of(namespace: str) -> tuple[str, str, str, str]:
    """Records, leases, generations and epoch of a deployment."""
    return f"{namespace}:nodes", f"{namespace}:leases", f"{namespace}:generations", f"{namespace}:epoch"


def routed_key(namespace: str) -> str:
    """Is there while a router that joined is."""
    return f"{namespace}:routed"


class LeaseKeeper:
    """Keeps one node's record alive from its own thread."""

    def __init__(
        self,
        url: str,
        record: NodeRecord,
        lease_ttl_s: float,
        alive: Callable[[], bool],
        load: Callable[[], Mapping[str, Any]],
        namespace: str = DEFAULT_NAMESPACE,
        on_fenced: Callable[[], None] = lambda: None,
        on_watched: Callable[[bool | None], None] = lambda watched: None,
    ) -> None:
        """alive: whether the engine loop ticked lately; load: see ``NodeRecord.with_load``; on_fenced: called once,
        from the keeper's thread, when a newer generation took over; on_watched: called from there after each renewal,
        with whether a supervisor or a router is there, None when Redis does not say."""
        self._client = connect(url)
        self._record, self._ttl_s, self._alive, self._load = record, lease_ttl_s, alive, load
        self._keys, self._on_fenced, self._on_watched = keys_of(namespace), on_fenced, on_watched
        self._others = f"{namespace}:holder", routed_key(namespace)
        self._watched: bool | None = None
        self._stop = threading.Event()
        self._writing = threading.Lock()  # one write at a time, so that none carries a state older than the last
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._trouble = ""
        self.fenced = False

    def start(self) -> None:
        """Write the record, then keep it. Raises Fenced, or redis.RedisError when Redis does not take it; it may then
        be called again."""
        self.write()
        self._thread.start()

    def write(self) -> None:
        """Write the record once. Raises Fenced or redis.RedisError."""
        with self._writing:
            record = self._record.with_load(self._load())
            ttl_ms = int(self._ttl_s * 1000)
            arguments: list[str | int] = [record.to_json(), record.generation, ttl_ms, record.id, uuid.uuid4().hex]
            self._watched = None
            keys = (*self._keys, *self._others)
            written = self._client.eval(_WRITE, len(keys), *keys, *arguments)
            self._watched = written == 2
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
                self._on_watched(self._watched)
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
        try:
            self._client.eval(_REMOVE, 3, *self._keys[:3], self._record.id, self._record.generation)
        except redis.RedisError as error:
            log.warning("record of %s not removed, its lease will expire: %s", self._record.id, error)
        self._client.close()
