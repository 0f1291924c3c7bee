"""How routers learn what prefix caches hold: a stream of events and a snapshot for each node generation, in Redis.

A node's `CachePublisher` sends what changed four times a lease, from its own thread; the engine never waits for it. A
router's `CacheWatcher` reads as often into its `PrefixIndex`. Neither has anything to do with a request: without Redis
the index goes stale, and routers choose by load alone.

Keys, of generation g of node n, under the deployment's namespace: ``cache:{n}:{g}:events``, a stream of the last
STREAM_EVENTS events, each under its own number; ``cache:{n}:{g}:keys``, a hash of the last snapshot (``at``,
``scheme``, ``keys``) and ``head``, the number of the last event. A snapshot is taken every SNAPSHOT_EVENTS events, so
stream and snapshot always overlap. Whenever Redis may not have all (it came back empty or older, an answer was lost,
more changed than is kept) the node writes a new snapshot under a number of its own, which no event has: whoever
followed sees the gap.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_args

import redis

from cluster.state.connection import JOIN_TIMEOUT_S, connect, connect_async
from cluster.state.node_lease import REFRESHES_PER_LEASE
from cluster.state.prefix_index import MAX_KEYS, CacheEvent, Key, Kind, NodeKeys, PrefixIndex, Snapshot, numbered
from cluster.state.registry_types import DEFAULT_NAMESPACE, NodeRecord
from paceline.kvcache.changes import CacheChanges
from paceline.kvcache.keys import KEY_BYTES, KeyScheme

log = logging.getLogger(__name__)

STREAM_EVENTS = 64  # kept; of at most MAX_CHANGES keys, so 1 MB at the very most
SNAPSHOT_EVENTS = 24
LIFETIME_S = 60.0  # of both keys after the last word of their node
STALE_LEASES = 1.0  # without an answer of Redis, what the index knows is used for so long

# KEYS: events, snapshot. ARGV: lifetime in ms, events kept, number of the last event that Redis should have, then
# number, kind and keys of each event. Returns 0, and does nothing, when it has not what it should.
_APPEND = """
local head = redis.call('HGET', KEYS[2], 'head')
if head ~= ARGV[3] then return 0 end
if head ~= redis.call('HGET', KEYS[2], 'at') and redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
for i = 4, #ARGV, 3 do
  redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[2], ARGV[i] .. '-0', 'kind', ARGV[i + 1], 'keys', ARGV[i + 2])
  redis.call('HSET', KEYS[2], 'head', ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return 1
"""
# KEYS: snapshot. ARGV: lifetime in ms, number of the last event, scheme, keys.
_SNAPSHOT = """
redis.call('HSET', KEYS[1], 'head', ARGV[2], 'at', ARGV[2], 'scheme', ARGV[3], 'keys', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""


class KeySource(Protocol):
    """paceline.kvcache.prefix.PrefixCache, as far as it is published."""

    @property
    def scheme(self) -> KeyScheme: ...

    def take_changes(self, whole: bool, max_keys: int) -> CacheChanges:
        """What came and went since the last call; with ``whole`` also all keys, at most ``max_keys``."""


def _names(namespace: str, node: Key) -> tuple[str, str]:
    root = f"{namespace}:cache:{node[0]}:{node[1]}"
    return f"{root}:events", f"{root}:keys"


class CachePublisher:
    """Publishes what one generation of a node has cached, from its own thread."""

    def __init__(
        self, url: str, node: Key, cache: KeySource, lease_ttl_s: float, namespace: str = DEFAULT_NAMESPACE
    ) -> None:
        self._client = connect(url)
        self._node, self._cache = node, cache
        self._keys = _names(namespace, node)
        self._period_s = lease_ttl_s / REFRESHES_PER_LEASE
        self._lifetime_ms = int(max(LIFETIME_S, 4 * lease_ttl_s) * 1000)
        self._head = 0  # number of the last event
        self._since_snapshot = 0  # events
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._trouble = False

    def start(self) -> None:
        """Begin to publish. Redis is not waited for."""
        self._thread.start()

    def publish(self) -> None:
        """Send what changed since the last call. Raises redis.RedisError; the next call finds out whether it came."""
        changes = self._cache.take_changes(self._since_snapshot >= SNAPSHOT_EVENTS, MAX_KEYS)
        if not changes.lost and self._append(numbered(self._head, changes)):
            if changes.keys is not None:
                self._snapshot(changes.keys)
            return
        if changes.keys is None:
            changes = self._cache.take_changes(True, MAX_KEYS)
        self._head += 1
        self._snapshot(changes.keys or ())

    def _append(self, events: Sequence[CacheEvent]) -> bool:
        """False when Redis has not what it should have. Without events it keeps what it has alive."""
        arguments: list[Any] = [self._lifetime_ms, STREAM_EVENTS, self._head]
        for event in events:
            arguments += [event.id, event.kind, b"".join(event.keys)]
        # Before they are sent: whether or not they arrive, nothing else may ever have these numbers.
        self._head += len(events)
        self._since_snapshot += len(events)
        return bool(self._client.eval(_APPEND, 2, *self._keys, *arguments))

    def _snapshot(self, keys: Sequence[bytes]) -> None:
        arguments: list[Any] = [self._lifetime_ms, self._head, self._cache.scheme.to_json(), b"".join(keys)]
        self._client.eval(_SNAPSHOT, 1, self._keys[1], *arguments)
        self._since_snapshot = 0

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.publish()
                self._report("")
            except Exception as error:  # whatever it is, the node serves on: it is only chosen by its load
                self._report(repr(error))
            self._stop.wait(self._period_s)

    def _report(self, trouble: str) -> None:
        """Log changes only."""
        if trouble and not self._trouble:
            log.warning("%s: its cached prefixes are not published: %s", self._node[0], trouble)
        elif self._trouble and not trouble:
            log.info("%s: its cached prefixes are published again", self._node[0])
        self._trouble = bool(trouble)

    def close(self) -> None:
        """Stop, and remove what was published. Idempotent; at most a few seconds without Redis."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
        try:
            self._client.delete(*self._keys)
        except redis.RedisError as error:
            log.warning("cached prefixes of %s not removed, they will expire: %s", self._node[0], error)
        self._client.close()


class CacheWatcher:
    """Keeps a router's ``index`` up to date with what the live nodes publish."""

    def __init__(
        self, url: str, nodes: Callable[[], list[NodeRecord]], lease_ttl_s: float, namespace: str = DEFAULT_NAMESPACE
    ) -> None:
        """nodes: the registry's view."""
        self._client = connect_async(url)
        self.index = PrefixIndex()
        self._nodes, self._ttl_s, self._namespace = nodes, lease_ttl_s, namespace
        self._unreadable: set[Key] = set()  # told already
        self._reachable = True
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read once, then keep reading."""
        await self.refresh()
        self._task = asyncio.create_task(self._poll(), name="cache-watcher")

    async def refresh(self) -> None:
        """Read now; on failure keep what is known until it is stale."""
        alive = [(node.id, node.generation) for node in self._nodes()]
        self.index.retain(alive)
        self._unreadable.intersection_update(alive)
        try:
            known = [node for node in alive if self.index.get(node) is not None]
            lost = await self._follow(known)
            for node in alive:
                if node not in known or node in lost:
                    await self._load(node)
        except (redis.RedisError, OSError, TimeoutError) as error:
            if self._reachable:
                log.warning("Redis is unreachable, nodes are soon chosen by load alone: %s", error)
            self._reachable = False
            return
        self._reachable = True
        self.index.confirm(STALE_LEASES * self._ttl_s)

    async def _follow(self, nodes: Sequence[Key]) -> set[Key]:
        """Take new events. Returns the nodes of which some are missing; they are forgotten."""
        if not nodes:
            return set()
        async with self._client.pipeline(transaction=True) as pipe:
            for node in nodes:
                events, state = _names(self._namespace, node)
                held = self.index.get(node)
                assert held is not None
                pipe.xrange(events, min=f"({held.last_id}-0", count=STREAM_EVENTS)
                pipe.hget(state, "head")
            answers = await pipe.execute()
        lost = set()
        for node, entries, head in zip(nodes, answers[::2], answers[1::2], strict=True):
            held = self.index.get(node)
            assert held is not None
            if not _followed(held, entries, head):
                self.index.forget(node)
                lost.add(node)
        return lost

    async def _load(self, node: Key) -> None:
        """Take a node's snapshot, where there is one, and the events after it; nothing of them when one is missing."""
        events, state = _names(self._namespace, node)
        async with self._client.pipeline(transaction=True) as pipe:
            pipe.hmget(state, "at", "scheme", "keys", "head")
            pipe.xrange(events, count=STREAM_EVENTS)
            (at, scheme, keys, head), entries = await pipe.execute()
        if at is None:
            return
        try:
            held = NodeKeys.of(Snapshot(int(at), KeyScheme.from_json(scheme), _split(keys)))
        except (ValueError, TypeError) as error:
            if node not in self._unreadable:
                log.warning("cached prefixes of %s cannot be read: %s", node[0], error)
            self._unreadable.add(node)
            return
        if _followed(held, entries, head):
            self.index.put(node, held)

    async def _poll(self) -> None:
        while not self._closing:
            await asyncio.sleep(self._ttl_s / REFRESHES_PER_LEASE)
            try:
                await self.refresh()
            except Exception:  # a fault here must not end what keeps the index from going stale for good
                log.exception("reading the nodes' cached prefixes failed")

    async def close(self) -> None:
        """Stop reading. Idempotent, and bounded without Redis."""
        self._closing = True  # redis-py was seen to swallow a cancellation: the loop must end without it too
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=JOIN_TIMEOUT_S)
            self._task = None
        await self._client.aclose()


def _followed(held: NodeKeys, entries: Sequence[tuple[bytes, dict[bytes, bytes]]], head: bytes | None) -> bool:
    """Whether the entries could be read, are without gap and end with ``head``. A node whose head is gone has not
    published for a long time, or is about to publish anew."""
    try:
        whole = held.follow([_event(number, fields) for number, fields in entries])
        return whole and head is not None and int(head) == held.last_id
    except (ValueError, KeyError):
        return False


def _event(number: bytes, fields: dict[bytes, bytes]) -> CacheEvent:
    kind = fields[b"kind"].decode()
    if kind not in get_args(Kind):
        raise ValueError(f"unknown kind of event {kind!r}")
    return CacheEvent(int(number.partition(b"-")[0]), kind, _split(fields[b"keys"]))  # type: ignore[arg-type]


def _split(keys: bytes) -> tuple[bytes, ...]:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole keys")
    return tuple(keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES))
