"""The resume journal: what another router needs to go on with a stream whose router died.

docs/internals/architecture.md#a-router-dies tells how it is used.

The text of a generation depends on its admitted request and seed alone, so an entry is that request with every default
resolved; which tokens were received is what the client itself knows best. A client that cannot send its tokens back
has a second entry, with the tokens that it was told (`cluster/routing/told.py`). Only a stream that resumes waits here,
to read: entries are put into a bounded table in memory, and one task seals and writes those that are due, in batches.

Life of an entry: ``keep`` -> written, and again every quarter of its lifetime, or as soon as Redis is seen to have lost
what it had (a key of this router alone, which every batch reads and sets, is gone) -> ``release`` -> written a last
time, with a short life when the answer is complete -> forgotten when it has expired. Bounds, of each router: bytes of
an entry, bytes of all entries (the oldest give way, told tokens before requests), seconds of life.

Keys: ``{namespace}:journal:sealed:{hash of tenant and generation id}``; ids are capabilities and are not stored.
Entries are sealed with the deployment's secret (`sealing.py`). One that was not is refused and counted. Routers that
seal nothing read and write ``{namespace}:journal:``, so neither kind meets an entry of the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import secrets
import time
from dataclasses import dataclass

import redis
from prometheus_client import CollectorRegistry, Counter

from cluster.state.connection import JOIN_TIMEOUT_S, OPERATION_TIMEOUT_S, answer_within, connect_async, may_pass
from cluster.state.registry_types import DEFAULT_NAMESPACE, namespace_of
from cluster.state.sealing import NotSealed, Seal
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable

log = logging.getLogger(__name__)

RETRY_S = 0.25  # after a failed batch, or a read that is tried again
READ_TIMEOUT_S = 2.0
READERS = 8  # connections of all reads that are tried again
COMPLETE_TTL_S = 10.0  # of a complete answer: its last chunk may still be lost with the router
REFRESHES_PER_TTL = 4
BATCH_ENTRIES = 64
BATCH_BYTES = 1024 * 1024  # packing a batch holds up the event loop, so it is small
MARK_LIVES = 2.0  # of an entry: how long the key stays that tells whether Redis has lost something
REWRITES_S = 5.0  # at least between two times that everything is written: Redis may evict that key over and over
ENTRY_OVERHEAD_BYTES = 512  # charged for each entry, which bounds their number too
# Told tokens of one plan are alike, whoever told them: another router's entry that has more of them stays.
_KEEP_LONGEST = """
if redis.call('STRLEN', KEYS[1]) > #ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
else
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
"""


@dataclass
class Kept:
    """One entry. ``live``: its generation runs; ``complete``: nothing is left to resume but a lost last chunk."""

    key: str
    entry: bytes
    size: int
    ttl_s: float
    streams: int = 1  # that share it
    live: bool = True
    complete: bool = False
    released_at: float = math.inf
    written_at: float = -math.inf
    expires_at: float = -math.inf  # in Redis


def journal_counters(registry: CollectorRegistry) -> tuple[Counter, Counter, Counter]:
    """Entries written, entries dropped by reason, and entries refused by reason."""
    written = Counter("paceline_journal_writes", "Entries written to the resume journal.", registry=registry)
    dropped = Counter(
        "paceline_journal_dropped",
        "Streams that another router cannot resume from the journal, by reason: full (newer entries took the room), "
        "size (the request is too large) or age (Redis was away for too long).",
        ["reason"],
        registry=registry,
    )
    refused = Counter(
        "paceline_journal_refused",
        "Entries of the resume journal that were read and not used, by reason: plain (nobody sealed it) or "
        "tampered (changed in Redis, or sealed with another secret).",
        ["reason"],
        registry=registry,
    )
    return written, dropped, refused


class Journal:
    """A router's side of the journal. ``start`` it on the event loop that uses it, ``close`` it."""

    # It has over 20 methods, most of them a few lines: those of callers, of its task, and of what both of them count.

    def __init__(
        self,
        url: str,
        seal: Seal,
        *,
        ttl_s: float,
        entry_bytes: int,
        total_bytes: int,
        namespace: str = DEFAULT_NAMESPACE,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """seal: of the deployment. ttl_s: life of an entry after its router's last word. registry: of the counters."""
        self.seal = seal
        self._client = connect_async(url)
        self._readers = asyncio.Semaphore(READERS)
        self._ttl_s, self._entry_bytes, self._total_bytes = ttl_s, entry_bytes, total_bytes
        self._prefix = f"{namespace}:journal:sealed:"
        self._mark, self._rewrite_at = f"{namespace}:journal:mark:{secrets.token_hex(8)}", -math.inf  # not before
        self._held: dict[str, Kept] = {}  # oldest first
        self._spare: dict[str, None] = {}  # of these, the keys of those that give way first
        self._bytes = 0
        self._due: dict[str, None] = {}  # keys to write, in order
        self._evicted: dict[str, float] = {}  # keys to delete: when they expire anyway
        self._wake = asyncio.Event()
        self._sweep_at = -math.inf
        self._reachable = True
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        into = registry if registry is not None else CollectorRegistry()
        self._written, self._dropped, self._refused = journal_counters(into)

    # -- used by streams: none of it waits ---------------------------------------------------------------------

    def keep(self, key: str, entry: bytes, *, spare: bool = False) -> Kept | None:
        """Have ``entry`` in the journal until ``release``. None when it is too large. spare: it gives way before others
        do, since it can be made again; streams of one key share an entry, which is the longest of theirs."""
        size = len(entry) + ENTRY_OVERHEAD_BYTES
        if len(entry) > self._entry_bytes or size > self._total_bytes:
            self._dropped.labels("size").inc()
            return None
        held = self._held.get(key)
        if spare and held is not None and held.live:
            held.streams += 1
            self.update(held, entry)
            return held
        self._forget(key)  # an earlier stream of the same generation
        kept = self._held[key] = Kept(key, entry, size, self._ttl_s)
        if spare:
            self._spare[key] = None
        self._bytes += size
        self._write_soon(key)
        self._make_room()
        return kept

    def release(self, kept: Kept, *, complete: bool) -> None:
        """Its stream is over; the client may come back for what is missing, soon when the answer is complete."""
        kept.streams -= 1
        if not self.holds(kept) or kept.streams:
            return
        kept.live, kept.complete, kept.released_at = False, complete, time.monotonic()
        if complete:
            kept.ttl_s = min(COMPLETE_TTL_S, self._ttl_s)
        self._write_soon(kept.key)

    def holds(self, kept: Kept) -> bool:
        """Whether it was neither evicted nor taken over by a later stream."""
        return self._held.get(kept.key) is kept

    def update(self, kept: Kept, entry: bytes) -> None:
        """What is kept is ``entry`` from now on, unless another stream has a longer one. Where it is too large, nothing
        is kept any more."""
        if not self.holds(kept) or len(entry) < len(kept.entry):
            return
        size = len(entry) + ENTRY_OVERHEAD_BYTES
        if len(entry) > self._entry_bytes or size > self._total_bytes:
            self._evict(kept.key, "size")
            return
        self._bytes += size - kept.size
        kept.entry, kept.size = entry, size
        self._write_soon(kept.key)
        self._make_room()

    async def read(self, key: str, timeout_s: float = READ_TIMEOUT_S) -> bytes | None:
        """The entry. None when there is none (any more), or one that was not sealed by this deployment. Raises
        NodeUnavailable when Redis does not say."""
        name = self._prefix + key
        try:
            return self._opened(name, await answer_within(timeout_s, self._client.get(name)))
        except (redis.RedisError, OSError) as error:  # TimeoutError is an OSError
            raise _unreadable(error) from None

    async def read_patiently(self, key: str, patience_s: float) -> bytes | None:
        """The same, tried again until Redis says or ``patience_s`` are over. Many such reads at once take turns at a
        few connections, so the writer always finds one."""
        name, end = self._prefix + key, time.monotonic() + patience_s
        while True:
            try:
                left_s = end - time.monotonic()
                return self._opened(name, await answer_within(min(left_s, OPERATION_TIMEOUT_S), self._in_turn(name)))
            except (redis.RedisError, OSError) as error:
                if self._closing or not may_pass(error) or time.monotonic() + RETRY_S >= end:
                    raise _unreadable(error) from None
            await asyncio.sleep(RETRY_S)

    async def _in_turn(self, name: str) -> bytes | None:
        async with self._readers:  # until the client has let go, however that read was given up
            found: bytes | None = await self._client.get(name)
            return found

    def _opened(self, name: str, found: bytes | None) -> bytes | None:
        try:
            return None if found is None else self.seal.open(name, found)
        except NotSealed as problem:
            self._refused.labels(problem.reason).inc()
            log.warning("the journal's entry %s is refused: it is %s", name, problem.reason)
            return None

    # -- the table ---------------------------------------------------------------------------------------------

    def _write_soon(self, key: str) -> None:
        self._due[key] = None
        self._wake.set()

    def _forget(self, key: str) -> None:
        kept = self._held.pop(key, None)
        self._spare.pop(key, None)
        self._due.pop(key, None)
        self._evicted.pop(key, None)
        self._bytes -= kept.size if kept is not None else 0

    def _make_room(self) -> None:
        while self._bytes > self._total_bytes:
            self._evict(next(iter(self._spare or self._held)), "full")

    def _evict(self, key: str, reason: str) -> None:
        kept = self._held[key]
        self._forget(key)
        if not kept.complete:
            self._dropped.labels(reason).inc()
        if kept.expires_at > time.monotonic():
            self._evicted[key] = kept.expires_at
            self._wake.set()

    def _sweep(self) -> None:
        """Now and then: what has to be written again is due, what has expired is forgotten."""
        now = time.monotonic()
        if now < self._sweep_at:
            return
        self._sweep_at = now + self._tick_s
        for key, kept in list(self._held.items()):
            if kept.live and now - kept.written_at >= self._ttl_s / REFRESHES_PER_TTL:
                self._due[key] = None
            elif not kept.live and key in self._due and now - kept.released_at > kept.ttl_s:
                self._dropped.labels("age").inc(not kept.complete)
                self._forget(key)
            elif not kept.live and key not in self._due and now >= kept.expires_at:
                self._forget(key)
        self._evicted = {key: expires for key, expires in self._evicted.items() if expires > now}

    @property
    def _tick_s(self) -> float:
        return min(self._ttl_s / (4 * REFRESHES_PER_TTL), 5.0)

    # -- the writer --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.create_task(self._run(), name="journal")

    async def _run(self) -> None:
        while not self._closing:
            try:
                self._sweep()
                if self._due or self._evicted:
                    await self._flush()
                    continue
                self._wake.clear()
                async with asyncio.timeout(self._tick_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            except Exception:  # a fault here must not end the journal
                log.exception("writing the journal failed")
                await asyncio.sleep(RETRY_S)

    async def _flush(self) -> None:
        """Write one batch; on failure it is due again after a pause."""
        batch = self._take_batch()
        doomed = list(self._evicted)[:BATCH_ENTRIES]
        pipe = self._client.pipeline(transaction=False)
        pipe.set(self._mark, 1, px=int(MARK_LIVES * self._ttl_s * 1000), get=True)
        for kept, ttl_s, _ in batch:
            name, ttl_ms = self._prefix + kept.key, max(1, int(ttl_s * 1000))
            sealed = self.seal.seal(name, kept.entry)
            if kept.key in self._spare:
                pipe.eval(_KEEP_LONGEST, 1, name, sealed, ttl_ms)
            else:
                pipe.set(name, sealed, px=ttl_ms)
        for key in doomed:
            pipe.delete(self._prefix + key)
        started = time.monotonic()
        try:
            had_mark, *_ = await pipe.execute()
        except (redis.RedisError, OSError) as error:
            self._due = {kept.key: None for kept, _, _ in batch if self._held.get(kept.key) is kept} | self._due
            if self._reachable:
                log.warning("the journal cannot be written, streams go on without: %s", error)
            self._reachable = False
            await asyncio.sleep(RETRY_S)
            return
        self._written.inc(len(batch))
        for key in doomed:
            self._evicted.pop(key, None)
        for kept, ttl_s, live in batch:
            self._note_written(kept, started, ttl_s, live)
        self._write_what_was_lost(had_mark is not None, started)

    def _write_what_was_lost(self, had_mark: bool, at: float) -> None:
        """After a batch that began ``at``: Redis may have come back empty, whether or not it was missed meanwhile."""
        if not self._reachable:
            log.warning("the journal is written again")
        if not self._reachable or (not had_mark and at >= self._rewrite_at):
            lost = {key: None for key, kept in self._held.items() if kept.live and -math.inf < kept.written_at < at}
            self._due |= lost
            self._rewrite_at = at + REWRITES_S if lost else self._rewrite_at
        self._reachable = True

    def _take_batch(self) -> list[tuple[Kept, float, bool]]:
        """Entries with the lifetime and liveness that they are written with: both may change meanwhile."""
        batch: list[tuple[Kept, float, bool]] = []
        size = 0
        for key in list(self._due)[:BATCH_ENTRIES]:
            kept = self._held[key]
            if batch and size + kept.size > BATCH_BYTES:
                break
            size += kept.size
            del self._due[key]
            batch.append((kept, kept.ttl_s, kept.live))
        return batch

    def _note_written(self, kept: Kept, at: float, ttl_s: float, live: bool) -> None:
        kept.written_at, kept.expires_at = at, time.monotonic() + ttl_s
        if self._held.get(kept.key) is not kept:
            if kept.key not in self._held:  # evicted while it was written
                self._evicted[kept.key] = kept.expires_at
        elif not live:
            kept.entry = b""  # only its size counts from here on

    async def close(self) -> None:
        """Stop writing. Idempotent, and bounded without Redis; entries stay for other routers until they expire."""
        self._closing = True
        if self._task is not None:
            self._wake.set()
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=JOIN_TIMEOUT_S)
            self._task = None
        await self._client.aclose()


def _unreadable(error: Exception) -> NodeUnavailable:
    return NodeUnavailable(f"the journal cannot be read: {error}")


def open_journal(config: ServeConfig, url: str, key: str, registry: CollectorRegistry | None = None) -> Journal | None:
    """The journal that the options ask for, started; None when it is off. key: `Secret.journal_key`."""
    if config.journal_mode == "off":
        return None
    journal = Journal(
        url,
        Seal(key),
        ttl_s=config.journal_ttl_s,
        entry_bytes=config.journal_entry_bytes,
        total_bytes=config.journal_total_bytes,
        namespace=namespace_of(config.deployment),
        registry=registry,
    )
    journal.start()
    return journal


def journal_key(tenant: str, generation_id: str) -> str:
    """Where a generation is kept. Another tenant's is another key, as is a wrong id."""
    named = f"{len(tenant)}:{tenant}:{generation_id}"
    return hashlib.sha256(named.encode()).hexdigest()
