"""Ray: where node processes run. The only module that applies ``ray.remote``."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, Literal
from weakref import WeakSet

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.nodes.addresses import node_answers
from cluster.nodes.bundles import Wanted
from cluster.nodes.host import START_TIMEOUT_S, STOP_MARGIN_S, NodeHost
from cluster.nodes.node_process import NodeProcess
from cluster.nodes.places import Places
from cluster.nodes.ray_session import CALL_S, SESSION, RayLost, get, within
from cluster.nodes.slots import NotPlaced
from cluster.state.registry_types import NodeRecord, Registry
from cluster.state.wanted import Kept
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable, PacelineError
from paceline.ranks.options import threads_per_rank
from paceline.role_options import kind_of
from paceline.rpc.identity import Identity

log = logging.getLogger(__name__)

PHASE_TIMEOUT_S = 1.0
# For a process that starts to say what it is at. Until it has imported everything it says nothing.
SILENT_START_S = {"cpu": 120.0, "cuda": 300.0}
LISTEN_S = 1.0  # between two looks at whether it has
ASK_TIMEOUT_S = 1.0
PLACE_S = 75.0  # for all nodes to be placed anew; past the deadlines of ``Places``
# A helper of a step's parallel regions looks for the next one for some 2 milliseconds, then it sleeps. Regions are tens
# of microseconds apart, and waking a sleeper takes as long. A message of the router takes a core for less than that.
SPIN_COUNT = "100000"
GPU_SHARE = 0.25  # of the one GPU of a place, for a node, its standby, and a predecessor that is slow to go. A node of
# several ranks takes all GPUs of its place, as Ray gives parts of one GPU alone: its successor waits until it is gone.
ROUTER = Identity("router")  # one that proves nothing


class RayNodes:
    """Launches node processes at their places."""

    def __init__(
        self,
        wanted: Sequence[Wanted],
        registry: Registry,
        interface: str = "",
        identity: Identity = ROUTER,
        left: Kept | None = None,
        record: Callable[[str, int], NodeRecord | None] = lambda node_id, generation: None,
    ) -> None:
        """wanted: the nodes to begin with. interface: of the nodes' addresses; empty: as their options say. identity:
        of who asks nodes whether they live. left: by an earlier supervisor, whose places are used on. record: what the
        registry knows of a generation of a node (``NodeDirectory.record``). Raises NodeUnavailable when Ray has no
        place for what the deployment cannot do without."""
        self._registry, self._interface, self._identity, self._record = registry, interface, identity, record
        # Names in Ray say whose they are. The rest is this start's own: what an earlier one left may linger.
        own = f"paceline-{registry.deployment}-{secrets.token_hex(4)}"
        self.name = left.ray_name if left is not None else own
        self._lifetime: Literal["detached"] | None = "detached" if registry.orphan_s else None
        self._with_standby = {node.node_id for node in wanted if node.standby}
        self._standbys: dict[str, tuple[int, RayNode]] = {}  # by node; with the generation that each is to be
        self._wanted = {node.node_id: node for node in wanted}
        self._made: WeakSet[RayNode] = WeakSet()
        self.patient = left is None  # at the deployment's own start, which ends with the first node that fails
        self._places = Places(self.name, wanted, self._lifetime, left.bundles if left is not None else None)

    def adopt(self, role: str, node_id: str, generation: int, actor: Any) -> RayNode:
        """A process that an earlier supervisor left."""
        node = RayNode(node_id, role, generation, actor, self._identity)
        self._made.add(node)
        return node

    def renew(self) -> None:
        """Leave a Ray that is lost for another one, and ask that for the same places. Nodes that live are known by
        their processes from then on. Blocks, on the thread of ``SESSION.run``. Raises NodeUnavailable; call it again
        then."""
        if not SESSION.lost:
            for node in list(self._made):
                node.leave(self._record(node.node_id, node.generation))
        SESSION.close()
        SESSION.renew([node.pid for node in self._made if node.pid])
        self._standbys.clear()
        wanted = list(self._wanted.values())
        self._places = within(PLACE_S, lambda: Places(self.name, wanted, self._lifetime))

    def bundles(self) -> dict[str, int]:
        """Where the nodes are, for whoever supervises next (`Kept`)."""
        return self._places.indices()

    def launch(self, role: str, node_id: str, generation: int, config: NodeConfig) -> RayNode:
        """A node process, not yet started: the standby, where there is one that lives. Raises NotPlaced."""
        stands_for, node = self._standbys.pop(node_id, (generation, None))
        if node is not None and (node.role, stands_for) != (role, generation):
            node.kill()
            node = None
        if node is None or node.died():
            if not within(CALL_S, lambda: self._places.there(node_id)):
                raise NotPlaced(f"{node_id} is not started: no host of the Ray cluster has room for it")
            node = self._process(role, node_id, generation, config)
        if self.patient:
            node.silent_s = math.inf
        if node_id in self._with_standby:  # once the node runs, so that it starts no later for it
            node.on_started = lambda: self._stand_by(role, node_id, generation + 1, config)
        return node

    def _stand_by(self, role: str, node_id: str, generation: int, config: NodeConfig) -> None:
        try:
            standby = self._process(role, node_id, generation, config, outlives=False)
            self._standbys[node_id] = generation, standby
        except (NodeUnavailable, ray.exceptions.RayError) as error:  # the node itself runs
            log.warning("%s has no standby: %s", node_id, error)

    def _process(
        self, role: str, node_id: str, generation: int, config: NodeConfig, *, outlives: bool = True
    ) -> RayNode:
        """Its actor is never restarted by Ray: the supervisor makes the next generation, under a name of its own (a
        dead actor's name stays taken while a handle lives). It sets its environment itself: a ``runtime_env`` would
        keep it from the workers that Ray has started already."""
        environment = {"OMP_NUM_THREADS": str(threads_per_rank(config)), "GOMP_SPINCOUNT": SPIN_COUNT}
        if self._interface:
            environment["NCCL_SOCKET_IFNAME"] = f"={self._interface}"  # exactly this one; without = it is a prefix
        actor = ray.remote(NodeHost).options(
            name=f"{self.name}/{node_id}#{generation}",
            namespace=self.name,
            lifetime=self._lifetime if outlives else None,
            num_cpus=0,  # the bundle's share is for placing; a predecessor that is slow to go must not block it
            num_gpus=(GPU_SHARE if config.tp == 1 else config.tp) if config.device == "cuda" else 0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=6,  # wait_stopped holds one, two after a takeover; start, stop and status have the rest
            scheduling_strategy=PlacementGroupSchedulingStrategy(*self._places.of(node_id)),
        )
        if SESSION.lost:
            raise RayLost(f"{node_id} is not started: Ray is lost; another is looked for")
        options = role, node_id, generation, config, self._registry, self._interface, environment
        made = within(CALL_S, lambda: actor.remote(*options))
        node = RayNode(node_id, role, generation, made, self._identity, kind_of(config.device))
        self._made.add(node)
        return node

    def check_fits(self, node: Wanted) -> None:
        """Raise InvalidRequest where a node needs more than its place has, as in another role."""
        self._places.check_fits(node)

    def add(self, node: Wanted) -> None:
        """One more node may be launched."""
        within(CALL_S, lambda: self._places.add(node))
        self._wanted[node.node_id] = node

    def remove(self, node_id: str) -> None:
        """A node that has ended is launched no more."""
        self._with_standby.discard(node_id)
        self._wanted.pop(node_id, None)
        _, standby = self._standbys.pop(node_id, (0, None))
        if standby is not None:
            standby.kill()
        within(CALL_S, lambda: self._places.remove(node_id))

    def close(self) -> None:
        """End the standbys and give the places back."""
        while self._standbys:
            self._standbys.popitem()[1][1].kill()
        if not SESSION.lost:
            within(CALL_S, self._places.close)


class RayNode:
    """One node process. Calls block, each with a deadline: run them in threads. Once its Ray is lost it is known by its
    process alone."""

    def __init__(
        self,
        node_id: str,
        role: str,
        generation: int,
        actor: Any,
        identity: Identity = ROUTER,
        kind: str = "cpu",
    ) -> None:
        """identity: of who asks whether it lives. kind: of its device, "cpu" or "cuda"; says how long a start may take.
        Raises RayLost."""
        self.node_id, self.role, self.generation, self._identity = node_id, role, generation, identity
        self._kind, self.silent_s = kind, SILENT_START_S[kind]
        self.on_started: Callable[[], None] = lambda: None
        self._actor = actor
        self._epoch = SESSION.epoch
        self._process: NodeProcess | None = None  # what it is known by once its Ray is lost
        self._asked: Any = None  # the answer to the latest ``answers``
        self._watch = self._watched()

    def start(self) -> str:
        """Start the node; returns its gRPC address. Raises the node's own PacelineError, else NodeUnavailable, as for a
        process that says nothing for ``silent_s``. One that says what it is at has the time of its device."""
        try:
            address = self._await_start(_ask(self._actor.start))
        except ray.exceptions.RayTaskError as error:  # str() of it is the remote traceback: for the log only
            cause = error.cause
            if isinstance(cause, PacelineError):  # its message is all that there is to say
                raise cause from None
            log.error("%s: %s", self.node_id, error)
            raise NodeUnavailable(f"{self.node_id} did not start: {type(cause).__name__}: {cause}") from None
        except ray.exceptions.RayError as error:
            raise NodeUnavailable(f"{self.node_id} did not start: {self._reason(error)}") from error
        self.on_started()
        return address

    def _await_start(self, started: Any) -> str:
        """What the call ``started`` returns or raises; NodeUnavailable when it takes too long."""
        silent_s, limit_s = self.silent_s, START_TIMEOUT_S[self._kind] + STOP_MARGIN_S
        begun = heard_at = time.monotonic()
        asked = _ask(self._actor.status)
        while True:
            with suppress(ray.exceptions.GetTimeoutError):
                address: str = get(started, LISTEN_S)
                return address
            now = time.monotonic()
            if _is_there(asked):
                asked, heard_at = _ask(self._actor.status), now
            if now - heard_at >= silent_s:
                raise NodeUnavailable(f"{self.node_id} did not start: its process said nothing for {silent_s:g} s")
            if now - begun >= limit_s:
                raise NodeUnavailable(f"{self.node_id} did not start within {limit_s:g} s")

    def _reason(self, error: ray.exceptions.RayError) -> str:
        """Why the process ended. What it raised while it was made comes as a remote traceback, which is for the log
        unless its last line is an error of Paceline."""
        told = str(error).strip()
        if not (isinstance(error, ray.exceptions.ActorDiedError) and error.actor_init_failed):
            return told
        last = told.splitlines()[-1]
        own = last.removeprefix("paceline.errors.")
        if own == last:
            log.error("%s: %s", self.node_id, told)
        return own

    @property
    def pid(self) -> int:
        """Its process id, where its Ray is lost and it lives on this host; else 0."""
        return self._process.pid if self._process is not None else 0

    @property
    def _left(self) -> bool:
        """Whether its Ray is lost, and was left."""
        return self._process is not None or self._epoch != SESSION.epoch

    async def answers(self) -> bool:
        """Whether the process says that its engine loop ticks, and its gRPC server answers, within ASK_TIMEOUT_S."""
        if self._process is not None:
            return await self._serves(self._process.address)
        if self._left:
            return False
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                status = await self._ask_status()
                return status["alive"] and not status["fenced"] and await self._serves(status["address"])
        except (TimeoutError, NodeUnavailable, ray.exceptions.RayError):
            return False

    async def _serves(self, address: str) -> bool:
        return await node_answers(self._identity, self.role, address)

    async def _ask_status(self) -> Any:
        """A process that is stopped has one question waiting at most."""
        with SESSION.waiting():
            if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
                self._asked = self._actor.status.remote()
            answer = self._asked.future()
        return await asyncio.wrap_future(answer)

    def phase(self) -> str:
        """What its start is at; empty where it does not answer at once."""
        try:
            at: str = get(_ask(self._actor.status), PHASE_TIMEOUT_S)["phase"]
        except (NodeUnavailable, ray.exceptions.RayError):
            return ""
        return at

    def died(self, timeout_s: float = 0.0) -> bool:
        """Whether the process is gone or was stopped; waits for it at most ``timeout_s``."""
        if self._left:
            return self._process is None or self._process.died()
        with suppress(RayLost), SESSION.waiting():
            if timeout_s:
                wait([self._watch], timeout_s)
            if not self._watch.done():
                return False
            with suppress(ray.exceptions.RayError):  # it is gone
                if not self._watch.result():  # it lives: another supervisor watched it meanwhile
                    self._watch = self._watched()
                    return False
            return True
        return False

    def _watched(self) -> Future[bool]:
        """Is done when the process is gone or was stopped. Ray tells it: asking Ray as often as the supervisor looks at
        its nodes, 20 times a second, would take a router's core where nodes are many. Raises RayLost."""
        with SESSION.waiting():
            future: Future[bool] = self._actor.wait_stopped.remote().future()
        return future

    def stop(self, grace_s: float) -> None:
        """Drain and end; kills what does not end in time. Never raises."""
        if self._process is not None:
            asyncio.run(self._process.idle(grace_s))
        elif not self._left:
            try:
                get(_ask(self._actor.stop, grace_s), grace_s + 2 * STOP_MARGIN_S)
            except (NodeUnavailable, ray.exceptions.RayError) as error:
                log.warning("%s did not stop by itself: %s", self.node_id, type(error).__name__)
        self.kill()

    def kill(self) -> None:
        """End the process now. Never raises; does nothing to one that is gone."""
        if self._left:
            if self._process is not None:
                self._process.kill()
            return
        try:
            with SESSION.waiting():
                ray.kill(self._actor, no_restart=True)
        except (NodeUnavailable, ValueError, ray.exceptions.RayError) as error:
            log.warning("%s could not be killed: %s", self.node_id, error)

    def leave(self, record: NodeRecord | None) -> None:
        """Its Ray is lost: know it by its process from now on. record: of this generation; None: the registry does not
        know it, so it counts as dead. Does nothing to one whose Ray was lost before."""
        if not self._left and record is not None:
            self._process = NodeProcess(record, self._identity)


def _ask(method: Any, *arguments: Any) -> Any:
    """A call of an actor's method, which is not waited for. Raises RayLost."""
    with SESSION.waiting():
        return method.remote(*arguments)


def _is_there(answer: Any) -> bool:
    with SESSION.waiting():
        return bool(ray.wait([answer], timeout=0)[0])
