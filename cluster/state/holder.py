"""Who supervises a deployment: one router process at a time, by a lease in Redis.

``{namespace}:holder`` is a hash: ``mark``, random, and ``who`` of the process that holds the deployment, ``ends``, when
its lease ends by the clock of the Redis server, ``serving``, what it tells routers that join (`published`), ``wanted``,
the nodes that operators want (`wanted`), and ``token``, which grows with every holder and outlives them. The holder
renews the lease from a thread of its own, so that a busy event loop does not lose it. Nothing else may supervise
while the lease holds; once it has run out, the next one may take it, and the earlier holder is told so (``on_lost``)
as soon as it can reach Redis again. Generations are issued to the holder alone.

While Redis is away, or takes no writes, the holder goes on: nobody else can take the lease there either.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import redis
from pydantic import TypeAdapter

from cluster.state.connection import JOIN_TIMEOUT_S, connect
from cluster.state.node_lease import NOW_MS, keys_of
from cluster.state.registry_types import namespace_of
from paceline.errors import ConfigError, NodeUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_S = 2.5  # after a kill -9 of the holder the next one waits no longer
RENEW_S = 0.5
RETRY_S = 0.1  # between two tries to take it, or to reach Redis
REDIS_WAIT_S = 10.0  # for a Redis that is away for a moment
FORGET_MS = 60_000  # records of nodes whose lease ended so long ago are removed

# Whether another process came after the caller. A Redis that lost its data may be told of an earlier holder first.
_COME_AFTER = """
local function come_after(mark, token, own_mark, own_token)
  token, own_token = tonumber(token) or 0, tonumber(own_token)
  return token > own_token or token == own_token and mark and mark ~= own_mark
end
"""
# KEYS: holder. ARGV: mark, who, lease in ms, an end that counts as over, whether only what was left is taken. Returns
# the token, nothing, and the nodes that were wanted by a holder who did not let go; or 0, who holds it and when that
# ends.
_TAKE = f"""
{NOW_MS}
local mark, who, ends = unpack(redis.call('HMGET', KEYS[1], 'mark', 'who', 'ends'))
if mark and mark ~= ARGV[1] and (tonumber(ends) or 0) > now and ends ~= ARGV[4] then return {{0, who, ends}} end
if ARGV[5] == '1' and redis.call('HEXISTS', KEYS[1], 'wanted') == 0 then return {{0, '', ''}} end
redis.call('HDEL', KEYS[1], 'serving')
redis.call('HSET', KEYS[1], 'mark', ARGV[1], 'who', ARGV[2], 'ends', now + ARGV[3])
return {{redis.call('HINCRBY', KEYS[1], 'token', 1), '', redis.call('HGET', KEYS[1], 'wanted') or ''}}
"""
# KEYS: holder, records, leases. ARGV: mark, who, lease in ms, token, age in ms at which records go, what is served,
# what nodes are wanted. Returns 1; or 0 and who took over. An empty Redis gets its holder back, with a token no lower.
_RENEW = f"""
{NOW_MS}
{_COME_AFTER}
local mark, who, token = unpack(redis.call('HMGET', KEYS[1], 'mark', 'who', 'token'))
if come_after(mark, token, ARGV[1], ARGV[4]) then return {{0, who or ''}} end
redis.call('HSET', KEYS[1], 'mark', ARGV[1], 'who', ARGV[2], 'ends', now + ARGV[3], 'token', ARGV[4])
if ARGV[6] ~= '' then redis.call('HSET', KEYS[1], 'serving', ARGV[6]) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'wanted', ARGV[7]) end
local leases = redis.call('HGETALL', KEYS[3])
for i = 1, #leases, 2 do
  if (tonumber(leases[i + 1]) or 0) + ARGV[5] < now then
    redis.call('HDEL', KEYS[2], leases[i])
    redis.call('HDEL', KEYS[3], leases[i])
  end
end
return {{1, ''}}
"""
# KEYS: holder. ARGV: mark, whether the nodes are left to the next holder.
_RELEASE = """
if redis.call('HGET', KEYS[1], 'mark') == ARGV[1] then
  redis.call('HDEL', KEYS[1], 'mark', 'who', 'ends', 'serving')
  if ARGV[2] ~= '1' then redis.call('HDEL', KEYS[1], 'wanted') end
end
"""
# KEYS: holder. ARGV: mark, token, which nodes are wanted. Returns whether the caller is the holder.
_KEEP = f"""
{_COME_AFTER}
local mark, token = unpack(redis.call('HMGET', KEYS[1], 'mark', 'token'))
if come_after(mark, token, ARGV[1], ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], 'wanted', ARGV[3])
return 1
"""
# KEYS: holder, generations. ARGV: mark, node id, generation to be above, token. Returns the generation; 0 to who is no
# holder.
_ISSUE = f"""
{_COME_AFTER}
local mark, token = unpack(redis.call('HMGET', KEYS[1], 'mark', 'token'))
if come_after(mark, token, ARGV[1], ARGV[4]) then return 0 end
local seen = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or '0') or 0
local generation = math.max(seen, tonumber(ARGV[3])) + 1
redis.call('HSET', KEYS[2], ARGV[2], generation)
return generation
"""
# KEYS: holder. Returns who holds it, empty where no lease runs.
_WHO = f"""
{NOW_MS}
local who, ends = unpack(redis.call('HMGET', KEYS[1], 'who', 'ends'))
if who and (tonumber(ends) or 0) > now then return who end
return ''
"""


@dataclass(frozen=True)
class Holder:
    """A process that holds a deployment."""

    model: str
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)  # Unix time
    admin: str = ""  # "host:port" where it serves operators; empty where it does not

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"process {self.pid} on {self.host} with model {self.model!r} since {since:%Y-%m-%d %H:%M:%S} UTC"


_HOLDER = TypeAdapter(Holder)


class DeploymentLease:
    """This process's hold on a deployment: ``acquire`` it, ask it for generations, ``release`` it."""

    def __init__(self, url: str, deployment: str, holder: Holder, on_lost: Callable[[str], object]) -> None:
        """on_lost: called once, from the lease's thread, when another process took over, with a description of it."""
        self._client = connect(url)
        self._deployment, self._on_lost = deployment, on_lost
        self._holder, self._who = holder, _HOLDER.dump_json(holder)
        namespace = namespace_of(deployment)
        self._key = f"{namespace}:holder"
        self._records, self._leases, self._generations, _ = keys_of(namespace)
        self._serving = b""
        self.wanted = b""  # what an earlier holder kept who did not let go, then what this one keeps
        self._mark = uuid.uuid4().hex
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deployment-lease", daemon=True)
        self._trouble = False
        self._renewed_at = -math.inf  # on the clock of ``time.monotonic``: when the latest renewal was asked for
        self._seen_end, self._seen_at = b"", time.monotonic()  # of another's lease: its end, and since when
        self.leaves = False  # the nodes, at ``release``
        self.token = 0  # of this hold; the next holder's is higher
        self.lost = False  # another process took over

    def acquire(self) -> None:
        """Take the lease, then keep it. A predecessor that renews no more is waited for.

        Blocks for at most a few LEASE_S, or REDIS_WAIT_S without Redis. Raises ConfigError when another process has
        the lease and renews it, and NodeUnavailable without Redis.
        """
        first_end = b""
        while True:
            token, who = self._patiently("the deployment's lease", self._try)
            if token:
                break
            first_end = first_end or self._seen_end
            if self._seen_end != first_end:  # it was renewed: its holder lives
                raise ConfigError(
                    "deployment",
                    f"{self._deployment!r} is held by {_describe(who)}; serve under another name "
                    "(--deployment NAME), or stop that process",
                )
            time.sleep(RETRY_S)
        self._hold(token)

    def succeed(self) -> bool:
        """Take the lease of a holder who was lost and left nodes; ask again and again. Blocks. Raises
        redis.RedisError."""
        token, _ = self._try(left_only=True)
        if token:
            self._hold(token)
        return bool(token)

    def _try(self, *, left_only: bool = False) -> tuple[int, bytes]:
        """Returns the token, or 0 and who holds it. A lease whose end stands still is over, whatever it says: Redis's
        clock was set back since the last renewal."""
        now = time.monotonic()
        over = self._seen_end if now - self._seen_at >= 2 * LEASE_S else b""
        token, who, found = self._take(over, left_only)
        if token:
            self._renewed_at, self.wanted = now, found
        elif found != self._seen_end:
            self._seen_end, self._seen_at = found, now
        return token, who

    def _hold(self, token: int) -> None:
        self.token = token
        self._thread.start()

    def held(self) -> bool:
        """Whether nobody else can have the lease yet, by this process's own clock."""
        return not self.lost and time.monotonic() - self._renewed_at < LEASE_S

    def issue(self, node_id: str, above: int) -> int:
        """The next generation of a node, higher than ``above`` and than all that Redis knows of. Blocks.

        Raises NodeUnavailable when Redis does not issue one in REDIS_WAIT_S, or when another process took over.
        """
        keys = (self._key, self._generations)
        generation = self._patiently(
            f"a generation for {node_id}",
            lambda: int(self._client.eval(_ISSUE, 2, *keys, self._mark, node_id, above, self.token)),
        )
        if not generation:
            raise NodeUnavailable(f"{node_id} is not started: another process supervises {self._deployment!r} now")
        return generation

    def keep(self, wanted: bytes) -> None:
        """Keep which nodes are wanted, for whoever holds the deployment next. Blocks. Raises as ``issue`` does."""
        arguments: list[str | bytes | int] = [self._mark, self.token, wanted]
        kept = self._patiently("room for the wanted nodes", lambda: self._client.eval(_KEEP, 1, self._key, *arguments))
        if not kept:
            raise NodeUnavailable(f"another process supervises {self._deployment!r} now")
        self.wanted = wanted

    def publish(self, serving: bytes) -> None:
        """From the next renewal on, tell routers that join what is served."""
        self._serving = serving

    def serves_operators(self, admin: str) -> None:
        """From the next renewal on, tell where that is. admin: "host:port"."""
        self._who = _HOLDER.dump_json(replace(self._holder, admin=admin))

    def _take(self, over: bytes = b"", left_only: bool = False) -> tuple[int, bytes, bytes]:
        arguments: list[str | bytes | int] = [self._mark, self._who, int(LEASE_S * 1000), over, int(left_only)]
        token, who, found = self._client.eval(_TAKE, 1, self._key, *arguments)
        return int(token), who, found

    def _patiently(self, what: str, ask: Callable[[], T]) -> T:
        """Ask again while Redis is away."""
        end = time.monotonic() + REDIS_WAIT_S
        while True:
            try:
                return ask()
            except redis.RedisError as error:
                if time.monotonic() >= end or self._stop.is_set():
                    told = f"Redis (option redis) did not give {what} in {REDIS_WAIT_S:g} s: {error}"
                    raise NodeUnavailable(told) from None
            self._stop.wait(RETRY_S)

    def _run(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                successor = self._renew()
            except Exception as error:  # whatever it is, the next renewal may do
                if not self._trouble:
                    log.warning("the lease of deployment %s is not renewed: %s", self._deployment, error)
                self._trouble = True
                continue
            if self._trouble:
                log.warning("the lease of deployment %s is renewed again", self._deployment)
            self._trouble = False
            if successor is not None:
                self.lost = True
                self._on_lost(successor)
                return

    def _renew(self) -> str | None:
        """Returns who took over, if somebody did. Raises redis.RedisError."""
        keys, asked_at = (self._key, self._records, self._leases), time.monotonic()
        arguments: list[str | bytes | int] = [self._mark, self._who, int(LEASE_S * 1000), self.token, FORGET_MS]
        renewed, who = self._client.eval(_RENEW, 3, *keys, *arguments, self._serving, self.wanted)
        if renewed:
            self._renewed_at = asked_at
        return None if renewed else _describe(who)

    def release(self) -> None:
        """Give the lease back. Idempotent; at most a few seconds without Redis."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)
        try:
            self._client.eval(_RELEASE, 1, self._key, self._mark, int(self.leaves))
        except redis.RedisError as error:
            log.warning("the lease of deployment %s is not released, it will end: %s", self._deployment, error)
        self._client.close()


def read_holder(url: str, deployment: str) -> Holder | None:
    """Who supervises a deployment; None where nobody does, or one of another version. Blocks. Raises
    redis.RedisError."""
    with connect(url) as client:
        who: Any = client.eval(_WHO, 1, f"{namespace_of(deployment)}:holder")
    try:
        return _HOLDER.validate_json(who) if who else None
    except ValueError:
        return None


def _describe(who: bytes) -> str:
    """The holder as it wrote itself down."""
    try:
        return str(_HOLDER.validate_json(who))
    except (ValueError, OverflowError, OSError):  # of another version, or nobody's
        return "another process"
