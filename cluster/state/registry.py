"""Who is alive: the router's view of the nodes' leases in Redis (``cluster.state.node_lease`` writes them).

Keys, all under ``paceline:{deployment}``: ``nodes`` hash of records by id, ``leases`` hash of the time at which each
ends, ``generations`` hash of the highest that was issued or registered, ``epoch`` a random mark that is gone when Redis
lost its data; ``holder`` is that of ``cluster.state.holder``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import redis

from cluster.state.connection import JOIN_TIMEOUT_S, connect_async
from cluster.state.node_lease import NOW_MS, REFRESHES_PER_LEASE, keys_of
from cluster.state.registry_types import DEFAULT_NAMESPACE, NodeRecord

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 64 * 1024  # a longer one is no node's; real ones have less than 2 KiB
MAX_LAPSED = 1024  # records without lease that are remembered
STOPPED_LEASES = 2
VOUCHED_S = 3.0  # for so long one answer keeps a node without lease in the view

# KEYS: records, leases, epoch. ARGV: longest record in bytes; of a longer one comes nothing. Returns the epoch, then
# id, end of the lease and record of each node whose lease holds. Nothing is written: a Redis that takes no writes can
# still be read.
_READ = f"""
{NOW_MS}
local answer = {{redis.call('GET', KEYS[3]) or ''}}
local leases = redis.call('HGETALL', KEYS[2])
for i = 1, #leases, 2 do
  local ends = tonumber(leases[i + 1])
  local record = ends and ends > now and redis.call('HGET', KEYS[1], leases[i])
  if record then
    if #record > tonumber(ARGV[1]) then record = '' end
    answer[#answer + 1] = leases[i]
    answer[#answer + 1] = leases[i + 1]
    answer[#answer + 1] = record
  end
end
return answer
"""


@dataclass
class _Lapsed:
    """A node whose lease ran out."""

    record: NodeRecord
    shown_until: float  # on the clock of ``time.monotonic``


class NodeDirectory:
    """The router's view of the live nodes, refreshed by a task.

    The view changes only on Redis's word. While Redis is away it stays as it is; and for one lease after an outage, or
    after Redis came back empty, a node that is missing stays too: it had no way to renew.

    A node may also lose its lease because Redis takes no writes. It stays for ``doubt_s``, in which the supervisor asks
    it, and for as long as the supervisor hears from it (``heard``). One whose process has ``ended`` leaves at once.
    """

    def __init__(
        self,
        url: str,
        lease_ttl_s: float,
        namespace: str = DEFAULT_NAMESPACE,
        doubt_s: float = 0.0,
        token: str = "",
    ) -> None:
        """token: of the deployment; nodes whose record does not prove that they have it are not shown. Empty: all."""
        self._token = token
        self._client = connect_async(url)
        self._ttl_s, self._doubt_s = lease_ttl_s, doubt_s
        self._keys = keys_of(namespace)
        self._leased: dict[str, NodeRecord] = {}
        self._lapsed: dict[str, _Lapsed] = {}  # by id, none of which is in _leased
        self._ended: dict[str, int] = {}  # by id, the last generation whose process has ended
        self._view: dict[str, NodeRecord] = {}
        self._kinds: frozenset[tuple[str, str]] = frozenset()  # model and digest; empty: all are shown
        self._told: set[tuple[str, int]] = set()  # ids and generations that were refused
        self._ends: dict[bytes, tuple[bytes, float]] = {}  # by id, when its lease ends, and since when it says so
        self._unreadable: set[bytes] = set()  # ids whose record was refused
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
        return node_id in self._leased and self._leased[node_id].generation == generation

    def record(self, node_id: str, generation: int) -> NodeRecord | None:
        """This generation's, while the node has its lease or has just lost it, and belongs to this deployment."""
        lapsed = self._lapsed.get(node_id)
        record = self._leased.get(node_id) or (lapsed.record if lapsed is not None else None)
        return record if record is not None and record.generation == generation and self._ours(record) else None

    def heard(self, node_id: str, generation: int, alive: bool) -> None:
        """A node without lease was asked. alive: it stays in the view for VOUCHED_S, else it leaves now."""
        lapsed = self._lapsed.get(node_id)
        if lapsed is None or lapsed.record.generation != generation:
            return
        lapsed.shown_until = time.monotonic() + VOUCHED_S if alive else -math.inf
        self._update()

    def ended(self, node_id: str, generation: int) -> None:
        """The process of a node has ended: it leaves the view now, whatever Redis says, or does not say."""
        self._ended.pop(node_id, None)
        self._ended[node_id] = generation
        if len(self._ended) > MAX_LAPSED:
            del self._ended[next(iter(self._ended))]
        self._update()

    def show_only(self, kinds: Iterable[tuple[str, str]]) -> None:
        """From now on show only nodes of these pairs of model and fingerprint digest: others are not this
        deployment's, whatever their name. They are named in the log once."""
        self._kinds = frozenset(kinds)
        self._update()

    def is_foreign(self, node_id: str, generation: int) -> bool:
        """Whether this generation of the node was seen, and is not shown because it serves something else."""
        return (node_id, generation) in self._told

    def strangers(self) -> list[str]:
        """Ids of the nodes with a lease that do not know this deployment's secret."""
        return [key for key, record in self._leased.items() if self._token and not record.is_marked(self._token)]

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
                log.warning("Redis does not answer, keeping %d nodes: %s", len(self._view), error)
            self._reachable, self._epoch = False, None
            return
        now = time.monotonic()
        if not self._reachable:
            log.warning("Redis answers again after %.1f s", self.stale_for_s)
        if self._leased and epoch != self._epoch:
            self._keep_until = now + self._ttl_s
        self._seen_at, self._reachable, self._epoch = now, True, epoch
        self._lease(_merge(self._leased, found) if now < self._keep_until else found, now)
        self._update()

    def _lease(self, leased: dict[str, NodeRecord], now: float) -> None:
        """Take note of who has a lease, and of who had one. A draining node goes by itself."""
        for node_id, record in self._leased.items():
            if node_id not in leased and record.state != "draining":
                self._lapsed[node_id] = _Lapsed(record, now + self._doubt_s)
        self._lapsed = {node_id: lapsed for node_id, lapsed in self._lapsed.items() if node_id not in leased}
        while len(self._lapsed) > MAX_LAPSED:
            del self._lapsed[next(iter(self._lapsed))]
        self._leased = leased

    def _update(self) -> None:
        now = time.monotonic()
        vouched = {node_id: lapsed.record for node_id, lapsed in self._lapsed.items() if lapsed.shown_until > now}
        there = (self._leased | vouched).items()
        running = {key: record for key, record in there if record.generation > self._ended.get(key, -1)}
        view = {key: record for key, record in running.items() if self._ours(record)}
        changed = _identity(view) != _identity(self._view)
        self._view = view
        if not changed:
            return
        for listener in self._listeners:
            try:
                listener(self.nodes())
            except Exception:  # one listener's fault must not blind the router
                log.exception("a listener of the node directory failed")

    def _ours(self, record: NodeRecord) -> bool:
        known = not self._kinds or (record.model, record.fingerprint_digest) in self._kinds
        if known and (not self._token or record.is_marked(self._token)):
            return True
        if (record.id, record.generation) not in self._told:
            self._told = {key for key in self._told if self.holds(*key)} | {(record.id, record.generation)}
            if known:
                log.error("%s at %s does not know this deployment's secret; not used", record.id, record.address)
                return False
            log.error(
                "%s generation %d at %s serves %r with fingerprint %.12s, which is not this deployment's; not used",
                *(record.id, record.generation, record.address, record.model, record.fingerprint_digest or "none"),
            )
        return False

    async def _read(self) -> tuple[bytes, dict[str, NodeRecord]]:
        records, leases, _, epoch_key = self._keys
        epoch, *rest = await self._client.eval(_READ, 3, records, leases, epoch_key, MAX_RECORD_BYTES)
        found: dict[str, NodeRecord] = {}
        unreadable: set[bytes] = set()
        ends = dict(zip(rest[::3], rest[1::3], strict=True))
        stopped = self._stopped(ends)
        for key, body in zip(rest[::3], rest[2::3], strict=True):
            if key in stopped:
                continue
            try:
                record = _record(key, body)
            except ValueError as error:
                unreadable.add(key)
                if key not in self._unreadable:
                    log.warning("the record of node %.100r cannot be read: %.500s", key, error)
            else:
                found[record.id] = record
        self._unreadable = unreadable
        return epoch, found

    def _stopped(self, ends: dict[bytes, bytes]) -> set[bytes]:
        """Ids of leases that were not renewed for two leases' time of this process, whatever the clock of Redis says:
        it may have been set back. ends: those that hold by that clock."""
        now = time.monotonic()
        if not self._reachable:  # they had no way to renew
            self._ends.clear()
        self._ends = {
            key: self._ends[key] if key in self._ends and self._ends[key][0] == end else (end, now)
            for key, end in ends.items()
        }
        return {key for key, (_, since) in self._ends.items() if now - since > STOPPED_LEASES * self._ttl_s}

    async def _poll(self) -> None:
        broken = False
        while not self._closing:
            await asyncio.sleep(self._ttl_s / REFRESHES_PER_LEASE)
            try:
                await self.refresh()
                broken = False
            except Exception:  # a fault in here must not freeze the view for good
                if not broken:
                    log.exception("reading the nodes' leases failed")
                broken = True

    async def close(self) -> None:
        """Stop reading. Idempotent, and bounded without Redis."""
        self._closing = True  # redis-py was seen to swallow a cancellation: the loop must end without it too
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=JOIN_TIMEOUT_S)
            self._task = None
        await self._client.aclose()


def _record(key: bytes, body: bytes) -> NodeRecord:
    """Raises ValueError."""
    if not body:
        raise ValueError(f"it has more than {MAX_RECORD_BYTES} bytes, or none")
    record = NodeRecord.from_json(body)
    if record.id.encode() != key:
        raise ValueError(f"it names another node, {record.id!r}")
    return record


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
