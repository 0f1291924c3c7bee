"""What runs inside a node's process, under Ray or not: the node, its event loop, its lease."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import redis

from cluster.nodes.addresses import own_address
from cluster.nodes.node_logs import stderr_file
from cluster.state.cache_events import CachePublisher, KeySource
from cluster.state.node_lease import Fenced, LeaseKeeper
from cluster.state.registry_types import NodeRecord, Registry
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable
from paceline.logs import configure_logging
from paceline.long_lived import give_back_memory, settle, uncollected
from paceline.phases import current_phase, phase
from paceline.role_options import kind_of
from paceline.v1.inference_pb2 import NodeInfo

log = logging.getLogger(__name__)

T = TypeVar("T")
START_TIMEOUT_S = {"cpu": 300.0, "cuda": 1800.0}  # loads the model; a GPU's compiles kernels and captures graphs
STOP_MARGIN_S = 15.0  # past the grace
LOOP_STALL_S = 2.0
REGISTER_TIMEOUT_S = 30.0  # Redis may fail over, or its host be slow
REGISTER_RETRY_S = 0.2
WATCHER_POLL_S = 1.0
WITHOUT_REDIS = 10  # times as long an orphan waits when Redis does not say whether it is one


class Shell(Protocol):
    """What a started node tells of itself; paceline.node.shell.NodeShell."""

    def alive(self) -> bool:
        """The engine thread runs and is not stuck."""

    def broken(self) -> bool:
        """It can never serve again."""

    def load(self) -> NodeInfo:
        """How busy the node is."""

    def prefix_cache(self) -> KeySource | None:
        """The cache whose keys routers are told of. None: nothing is cached."""

    def fingerprint_digest(self) -> str:
        """Equal for two nodes exactly when they can pair."""


class Node(Protocol):
    """prefill_node.node.PrefillNode or decode_node.node.DecodeNode."""

    @property
    def shell(self) -> Shell: ...

    def counts(self) -> dict[str, Any]:
        """What routers show of this node besides its load, by field of the registry's record."""

    async def start(self) -> str:
        """Load the model, start engine and server; returns "host:port"."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new work, let what runs finish for ``grace_s`` seconds, then end."""


def make_node(role: str, node_id: str, config: NodeConfig) -> Node:
    """The node of a role; imports torch, and what it will load its model with: a standby is to have it all."""
    with uncollected():
        import_module("paceline.assembly.build")
    if role == "prefill":
        from prefill_node.node import PrefillNode

        return PrefillNode(config, node_id)
    if role == "decode":
        from decode_node.node import DecodeNode

        return DecodeNode(config, node_id)
    raise ValueError(f"role {role!r} is neither prefill nor decode")


def give_place_back() -> None:
    """Remove the placement group that this actor runs in, and with it what else of the deployment runs there."""
    import ray
    from ray.util.placement_group import get_current_placement_group, remove_placement_group

    if ray.is_initialized() and (group := get_current_placement_group()) is not None:
        remove_placement_group(group)


class NodeHost:
    """Made, ``start``ed and ``stop``ped once. Methods may be called from any thread."""

    def __init__(
        self,
        role: str,
        node_id: str,
        generation: int,
        config: NodeConfig,
        registry: Registry,
        interface: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """interface: the node listens at its address, whatever ``config.host`` says. environment: variables of the
        process, set before torch is imported, which reads them once."""
        os.environ.update(environment)
        configure_logging(config.log_level, config.log_format, node_id)
        self._role, self._node_id, self._generation = role, node_id, generation
        self._config = config.model_copy(update={"host": own_address(config.host, interface)})
        self._registry = registry
        with phase("importing"):
            self._node = make_node(role, node_id, self._config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="node-loop", daemon=True)
        self._address = ""
        self._keeper: LeaseKeeper | None = None
        self._publisher: CachePublisher | None = None
        self._watched_at = self._told_at = time.monotonic()
        self._watched: bool | None = True  # what was told last
        self._watcher = 0  # the latest call of ``wait_stopped``
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        give_back_memory()

    def start(self) -> str:
        """Start the node and register it; returns its gRPC address. Raises what the node's start raises, and
        NodeUnavailable when it cannot be registered. After a failure the process is of no use: end it."""
        self._thread.start()
        self._config.check_known()
        self._address = self._run(self._node.start(), START_TIMEOUT_S[kind_of(self._config.device)])
        registry = self._registry
        keeper = LeaseKeeper(
            registry.url,
            self._record(),
            registry.lease_ttl_s,
            self._alive,
            self._load,
            registry.namespace,
            self._fenced,
            self._watched_by,
        )
        with phase("registering"):
            self._register(keeper)
        self._keeper = keeper
        cache = self._node.shell.prefix_cache()
        if cache is not None:
            node = self._node_id, self._generation
            self._publisher = CachePublisher(registry.url, node, cache, registry.lease_ttl_s, registry.namespace)
            self._publisher.start()
        settle()
        return self._address

    def _register(self, keeper: LeaseKeeper) -> None:
        """Redis may be away for a moment: a model that is loaded is worth a wait."""
        end = time.monotonic() + REGISTER_TIMEOUT_S
        while True:
            try:
                keeper.start()
                return
            except (redis.RedisError, Fenced) as error:
                if isinstance(error, Fenced) or time.monotonic() >= end:
                    keeper.close()
                    told = f"{self._node_id} cannot be registered in Redis (option redis): {error}"
                    raise NodeUnavailable(told) from None
            time.sleep(REGISTER_RETRY_S)

    def stop(self, grace_s: float) -> None:
        """Refuse new work, let what runs finish for ``grace_s``, end everything. Idempotent; a second caller waits
        for the first."""
        with self._stopping:
            if self._stopped.is_set():
                return
            try:
                self._end(grace_s)
            finally:
                self._stopped.set()

    def _end(self, grace_s: float) -> None:
        keeper = self._keeper
        if keeper is not None:
            keeper.drain()
        try:
            if self._address:
                self._run(self._node.stop(grace_s), grace_s + STOP_MARGIN_S)
        finally:
            if self._publisher is not None:
                self._publisher.close()
            if keeper is not None:
                keeper.close()
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=STOP_MARGIN_S)
            if not self._thread.is_alive():
                self._loop.close()

    def status(self) -> dict[str, Any]:
        """Who this is, whether it ticks, what its start is at, and its load once started."""
        started = bool(self._address) and not self._stopped.is_set()
        return {
            "id": self._node_id,
            "role": self._role,
            "generation": self._generation,
            "address": self._address,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
            "alive": started and self._alive(),
            "fenced": self._keeper is not None and self._keeper.fenced,
            "phase": current_phase(),
            **(self._load() if started else {}),
        }

    def wait_stopped(self) -> bool:
        """Block until ``stop``; a caller elsewhere learns of this process's death by the call's failing. False: another
        supervisor watches now, whose call ends that of the one before it."""
        self._watcher = mine = self._watcher + 1
        while self._watcher == mine and not self._stopped.wait(WATCHER_POLL_S):
            pass
        return self._stopped.is_set()

    def _record(self) -> NodeRecord:
        return NodeRecord(
            id=self._node_id,
            role=self._role,
            generation=self._generation,
            address=self._address,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            started_at=time.time(),
            model=self._config.model,
            fingerprint_digest=self._node.shell.fingerprint_digest(),
            build=version("paceline"),
            log=stderr_file(),
            ranks=self._config.tp,
        ).marked(self._config.call_token.get_secret_value())

    def _fenced(self) -> None:
        """A successor serves: end at once, in a thread, as the keeper that calls is joined on the way."""
        log.error("%s generation %d has a successor; it ends", self._node_id, self._generation)
        threading.Thread(target=self._yield, name="fenced", daemon=True).start()

    def _yield(self) -> None:
        """End; a process that outlived its supervisor has nobody who would end it."""
        self.stop(0.0)
        if self._registry.orphan_s:
            os._exit(0)

    def _watched_by(self, somebody: bool | None) -> None:
        """End when nobody was there for too long, and nobody waits for anything: an orphan holds a device for ever.
        After an outage of Redis, or a pause of this process, the others get the whole time to show themselves again."""
        limit_s, now = self._registry.orphan_s, time.monotonic()
        told_anew = somebody is not self._watched or now - self._told_at > limit_s / 2
        self._watched, self._told_at = somebody, now
        if somebody or not limit_s or told_anew or self._busy():
            self._watched_at = now
        elif now - self._watched_at > limit_s * (1 if somebody is False else WITHOUT_REDIS):
            log.error("%s has seen neither supervisor nor router for %g s; it ends", self._node_id, limit_s)
            threading.Thread(target=self._leave, name="orphan", daemon=True).start()

    def _busy(self) -> bool:
        info = self._node.shell.load()
        return info.running + info.waiting > 0

    def _leave(self) -> None:
        """End this process, and give its place back to Ray: nobody else will."""
        self.stop(0.0)
        with suppress(Exception):
            give_place_back()
        os._exit(0)

    def _run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _alive(self) -> bool:
        """Engine thread and event loop both tick. Ends the process of a node that can never serve again, as a kill of
        it would: its successor is not to wait for its lease."""
        if self._node.shell.broken() and not self._stopping.locked():
            log.error("%s generation %d has lost a rank; it ends", self._node_id, self._generation)
            os._exit(1)
        ticked = threading.Event()
        self._loop.call_soon_threadsafe(ticked.set)
        return ticked.wait(LOOP_STALL_S) and self._node.shell.alive()

    def _load(self) -> dict[str, Any]:
        info = self._node.shell.load()
        return {
            "running": info.running,
            "waiting": info.waiting,
            "free_pages": info.free_pages,
            "total_pages": info.total_pages,
            **self._node.counts(),
        }
