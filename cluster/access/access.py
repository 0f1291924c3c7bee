"""The front door's decision about a call, before anything of its body or message is read."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path

from cluster.access.caller import Caller
from cluster.access.keys import KeyFile, RefusedKey, Scope
from cluster.access.pace import Pace
from cluster.access.quotas import AccessCounts, Quotas
from cluster.access.redis_counters import RedisCounters
from cluster.state.registry_types import Registry
from paceline.config import ServeConfig
from paceline.errors import PacelineError, PermissionDenied, Unauthenticated
from paceline.rpc.audit import Audit, network_of

REFUSALS_PER_S, REFUSALS_AT_ONCE = 50.0, 200.0  # of one address; further ones are answered late
REFUSAL_LATE_S = 5.0  # at most
MAX_LATE = 256  # refusals that wait at once; beyond them each is answered at once
HOLD_MARGIN_S = 60.0  # a quota's hold outlives the longest request by so much


class Need(Enum):
    """What a call needs where the deployment has API keys."""

    OPEN = "open"  # nothing
    KEY = "key"  # any valid key
    INFER = "infer"  # a key with this scope, for the model that is served
    METRICS = "metrics"  # a key with this scope
    OPERATOR = "operator"  # a key with this scope


class Access:
    """Who may call. ``start`` follows the file of keys; ``close`` ends that, and the quotas."""

    def __init__(
        self,
        keys: KeyFile,
        quotas: Quotas,
        names: tuple[str, ...],
        metrics: AccessCounts,
        audit: Audit,
        audits_calls: bool = False,
    ) -> None:
        """names: those of the model that is served. audits_calls: every call of a key has a line."""
        self.quotas, self.audit, self._audits_calls = quotas, audit, audits_calls
        self._keys, self._names, self._metrics = keys, names, metrics
        self._refusals, self._late = Pace(REFUSALS_PER_S, REFUSALS_AT_ONCE, REFUSAL_LATE_S), 0

    async def admit(self, sent: str | None, peer: str, act: str, need: Need) -> Caller | None:
        """``know``, then ``count``."""
        caller = await self.know(sent, peer, act, need)
        await self.count(caller, act, need)
        return caller

    async def know(self, sent: str | None, peer: str, act: str, need: Need) -> Caller | None:
        """Who calls; None where anybody may. Waits with a refusal alone. sent: the key, None without one. peer: the
        address. act: route or RPC. Raises Unauthenticated, PermissionDenied."""
        if need is Need.OPEN:
            return None
        key_id = ""
        try:
            key = self._keys.find(sent)
            key_id, caller = key.id, Caller(key, peer, partial(self._refused_later, peer, key.id, act))
            _check(caller, need, self._names)
        except (Unauthenticated, PermissionDenied) as error:
            key_id = error.key_id if isinstance(error, RefusedKey) else key_id
            self.audit.refused(peer, key_id, act, str(error))
            self._metrics.access_refused(
                "PermissionDenied" if isinstance(error, PermissionDenied) else "Unauthenticated"
            )
            await self._wait_to_refuse(peer)
            raise
        return caller

    async def count(self, caller: Caller | None, act: str, need: Need) -> None:
        """A call of one who is known. Raises Overloaded when the key has no more requests."""
        if caller is None:
            return
        try:
            await self.quotas.request(caller)
        except PacelineError as error:
            if self._audits_calls:
                self.audit.done(caller.peer, caller.key.id, act, f"refused: {error}")
            raise
        if self._audits_calls or need is Need.OPERATOR:
            self.audit.done(caller.peer, caller.key.id, act, "allowed")

    def _refused_later(self, peer: str, key_id: str, act: str, reason: str, why: str) -> None:
        self.audit.refused(peer, key_id, act, why)
        self._metrics.access_refused(reason)

    async def _wait_to_refuse(self, peer: str) -> None:
        if self._late >= MAX_LATE:
            return
        self._late += 1
        try:
            await self._refusals.take(network_of(peer))
        finally:
            self._late -= 1

    def start(self) -> None:
        """Follow the file of keys, on the running event loop."""
        self._keys.start()

    async def close(self) -> None:
        """Idempotent."""
        self.audit.tell()
        await self._keys.close()
        await self.quotas.close()


def _check(caller: Caller, need: Need, names: tuple[str, ...]) -> None:
    scopes: dict[Need, Scope] = {Need.INFER: "infer", Need.METRICS: "metrics", Need.OPERATOR: "operator"}
    if need in scopes:
        caller.check_scope(scopes[need])
    if need is Need.INFER:
        caller.check_model(names)


def open_access(config: ServeConfig, registry: Registry, metrics: AccessCounts) -> Access | None:
    """What the options ask for; None without ``api_keys``. All routers of a deployment count together. Raises
    ConfigError for a file that is wrong."""
    if not config.api_keys:
        return None
    longest_s = config.request_timeout_s + config.queue_timeout_s + HOLD_MARGIN_S
    shared = RedisCounters(registry.url, longest_s, registry.namespace) if registry.url else None
    keys, quotas = KeyFile(Path(config.api_keys)), Quotas(shared, metrics)
    return Access(keys, quotas, config.served_names, metrics, Audit(), config.audit_calls)


def bearer(header: str | bytes | None) -> str | None:
    """The key in an ``authorization`` header, which is text unless somebody plays tricks."""
    if isinstance(header, bytes):
        return None
    scheme, _, key = (header or "").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def handshakes_refused(metrics: AccessCounts, audit: Audit, kind: str) -> Callable[[str], None]:
    """To be told why a handshake failed: counts it and writes a line. Nobody knows its address. kind: HTTPS or gRPC."""

    def refused(why: str) -> None:
        metrics.access_refused("Handshake")
        audit.refused("", "", f"{kind} handshake", why)

    return refused
