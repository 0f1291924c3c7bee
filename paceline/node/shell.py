"""What a node is whatever its role: an engine thread, a gRPC server, a timer, and what it tells of itself."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Literal, Protocol

import grpc.aio

from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import NodeUnavailable
from paceline.kvcache.prefix import PrefixCache
from paceline.rpc.calls import end_server, start_server
from paceline.rpc.guard import Guard
from paceline.rpc.handshakes import Handshakes
from paceline.rpc.identity import Identity
from paceline.rpc.tls import Role
from paceline.serving.cores import CoreShare
from paceline.serving.ledger import PageLedger
from paceline.serving.loop import EngineLoop, every
from paceline.tracing import Recorder
from paceline.v1 import handoff_pb2, inference_pb2, node_pb2, trace_pb2
from paceline.wire import trace_to_proto

log = logging.getLogger(__name__)

TICK_S = 0.1  # of the deadlines
STOP_TIMEOUT_S = 10.0  # for the engine thread

NodeRole = Literal["prefill", "decode"]


class Engine(Protocol):
    """What the shell needs of a role's engine: its step, and figures that it reads from other threads."""

    @property
    def pages(self) -> PageLedger: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_held(self) -> int: ...

    def step(self) -> bool:
        """Do one step of work, on the engine thread. False when there was nothing to do."""


class NodeShell:
    """Made, then ``start``ed. At the end ``end_calls``, then, when the role's links are gone, ``end_engine``."""

    guard: Guard  # of the server, once it is started

    def __init__(
        self,
        role: NodeRole,
        node_id: str,
        config: NodeConfig,
        runner: ModelRunner,
        fingerprint: handoff_pb2.Fingerprint,
        engine: Engine,
    ) -> None:
        self._role = role
        self._node_id = node_id
        self._config = config
        self._runner = runner
        self._fingerprint = fingerprint
        self._engine = engine
        self._address = ""
        self._draining = False
        self._active = 0  # calls in progress
        self._malformed = 0  # messages that are none of their RPC
        self.identity = Identity.of_node(role, config)
        self.recorder = Recorder(config.trace_requests)
        self._cores = share_cores(config)
        self.loop = EngineLoop(f"engine-{node_id}", engine.step, self._cores)

    # -- life --------------------------------------------------------------------------------------------------

    async def start(
        self, register: Callable[[grpc.aio.Server], None], tick: Callable[[], None], roles: Mapping[str, Role]
    ) -> str:
        """Start engine thread, timer and server; returns "host:port". ``tick`` runs every ``TICK_S`` on the event
        loop. roles: who may call each method. ConfigError naming ``tls_dir``."""
        config = self._config
        self.guard = self.identity.guard(roles)
        self.loop.start()
        self._timer = asyncio.create_task(every(TICK_S, tick))
        max_rpcs = 4 * (config.max_waiting + config.max_running) + 64
        handshakes = Handshakes(self.guard.refuse_handshake)
        self._server, self._address = await start_server(
            register,
            config.host,
            max_rpcs,
            [self.guard],
            partial(self.identity.bind, began=handshakes.began),
            self._note_malformed,
            handshakes,
        )
        log.info("%s node %s serves at %s", self._role, self._node_id, self._address)
        return self._address

    async def end_calls(self, grace_s: float) -> None:
        """Refuse new calls, let those in progress finish for ``grace_s`` seconds, then end the server."""
        self._draining = True
        await end_server(self._server, lambda: self._active, grace_s)
        self._timer.cancel()

    async def end_engine(self) -> None:
        """End the engine thread, once nothing is posted to it any more."""
        await asyncio.to_thread(self.loop.stop, STOP_TIMEOUT_S)
        await asyncio.to_thread(self._runner.close)
        if self._cores is not None:
            self._cores.close()

    def alive(self) -> bool:
        """The engine thread runs and is not stuck, and no rank of the node is lost."""
        return self.loop.alive() and self._runner.alive()

    def broken(self) -> bool:
        """Whether the node can never serve again: one of its ranks is lost."""
        return not self._runner.alive()

    def counts(self) -> dict[str, int]:
        """What both roles count, by field of the registry's record."""
        cores = self._cores.counts() if self._cores is not None else {}
        return {"refused_calls": self.guard.refused, "refused_messages": self._malformed, **cores}

    def _note_malformed(self) -> None:
        self._malformed += 1

    # -- calls -------------------------------------------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that a draining node lets finish. NodeUnavailable when it drains already."""
        self.refuse_when_draining()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    def refuse_when_draining(self) -> None:
        """NodeUnavailable when the node takes no new work."""
        if self._draining:
            raise NodeUnavailable(f"{self._role} node {self._node_id} is draining")

    # -- what it tells of itself -------------------------------------------------------------------------------

    def load(self) -> inference_pb2.NodeInfo:
        """How busy the node is."""
        engine = self._engine
        return inference_pb2.NodeInfo(
            id=self._node_id,
            role=self._role,
            address=self._address,
            running=engine.num_running,
            waiting=engine.num_waiting,
            free_pages=engine.pages.free_pages,
            total_pages=self._runner.allocator.num_pages,
        )

    def status(self) -> node_pb2.StatusResponse:
        """Load and identity."""
        return node_pb2.StatusResponse(
            node=self.load(),
            fingerprint=self._fingerprint,
            bit_exact=self._runner.bit_exact,
            draining=self._draining,
            held=self._engine.num_held,
            integrity=self._engine.pages.integrity,
            max_model_len=self._runner.max_model_len,
            vocab_size=self._runner.vocab_size,
        )

    async def trace(self, request: trace_pb2.TraceRequest) -> trace_pb2.TraceResponse:
        """When what happened here to one of the latest requests."""
        owner = request.cache_salt if request.HasField("cache_salt") else None
        kept = self.recorder
        return await kept.beside_the_loop(lambda: trace_to_proto(kept.read(request.request_id, self._node_id, owner)))

    def prefix_cache(self) -> PrefixCache | None:
        """What routers are told of; None: nothing is cached."""
        return self._runner.prefix

    def fingerprint_digest(self) -> str:
        """Equal for two nodes exactly when they can pair."""
        return hashlib.sha256(self._fingerprint.SerializeToString(deterministic=True)).hexdigest()


def share_cores(config: NodeConfig) -> CoreShare | None:
    """This node's part in its host's cores; None where it has threads of its own, or cannot share. A node of several
    ranks cannot: who takes turns is rank 0 alone."""
    if not config.cores_group or config.tp > 1:
        return None
    try:
        return CoreShare(config.cores_group, config.cores_slot)
    except OSError as error:
        log.warning("cores are not shared, this node keeps to %d threads: %s", config.threads, error)
        return None


async def load_model(config: NodeConfig, *, decodes: bool) -> ModelRunner:
    """The runner of a node, its model loaded on a thread of its own. ``decodes``: whether it runs rounds.

    That thread ends with it, and so does its team of OpenMP: while a second team lives, OpenMP counts more threads than
    cores and puts the engine's helpers to sleep after each of the hundreds of parallel regions of a step.
    """
    loading = ThreadPoolExecutor(1, "load-model")
    try:
        return await asyncio.get_running_loop().run_in_executor(loading, _build, config, decodes)
    finally:
        loading.shutdown(wait=False)  # a start that is given up must not hold the event loop until the load is done


def _build(config: NodeConfig, decodes: bool) -> ModelRunner:
    from paceline.assembly.build import build_runner  # heavy: loads the model

    return build_runner(config, decodes=decodes)
