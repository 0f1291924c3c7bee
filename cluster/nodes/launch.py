"""Ray: where node processes run. The only module that applies ``ray.remote``."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import psutil

from cluster.nodes.addresses import check_listens, node_answers
from cluster.nodes.host import START_TIMEOUT_S, STOP_MARGIN_S, NodeHost
from cluster.nodes.slots import NotPlaced
from cluster.state.registry_types import Registry
from cluster.state.wanted import Kept
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable, PacelineError
from paceline.ranks.options import threads_per_rank
from paceline.rpc.identity import Identity

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray would otherwise hide GPUs from actors that ask for none; Paceline assigns devices itself.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Ray would run nodes at niceness 15, so that whatever else the host does comes before a token.
os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.nodes.bundles import Wanted
from cluster.nodes.places import Places
from cluster.nodes.private_ray import start_private_ray

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 10.0
PHASE_TIMEOUT_S = 1.0
ASK_TIMEOUT_S = 1.0
AGENT_TIMEOUT_S = 2.0  # for Ray's helpers to end by themselves
# A helper of a step's parallel regions looks for the next one for about half a millisecond, then it sleeps. Regions are
# tens of microseconds apart, and waking a sleeper takes as long: a step of SmolLM2 on two cores took twice the time.
SPIN_COUNT = "20000"
GPU_SHARE = 0.25  # of the one GPU of a place, for a node, its standby, and a predecessor that is slow to go. A node of
# several ranks takes all GPUs of its place, as Ray gives parts of one GPU alone: its successor waits until it is gone.
NAMESPACE = "paceline"  # one for all, so that a supervisor finds the placement groups of the one before it

ROUTER = Identity("router")  # one that proves nothing

_private: list[psutil.Process] = []  # Ray's own processes of a private cluster, to be ended with it


def start_ray(address: str, num_cpus: int | None = None) -> None:
    """Start a private Ray on this machine ("local") or join the cluster at ``address``.

    num_cpus: only for a private one, what it may place; all cores unless given. Raises NodeUnavailable. A cluster
    with token authentication, Ray's default, wants ``RAY_AUTH_MODE=token`` and the token on this host.
    """
    if address == "local":
        before = set(psutil.Process().children())
        start_private_ray(num_cpus or os.cpu_count() or 1)
        _private.extend(child for child in psutil.Process().children() if child not in before)
        return
    try:
        check_listens(address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # ConnectionError is an OSError
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        raise NodeUnavailable(
            f"cannot join the Ray cluster at {address} (RAY_AUTH_MODE is {mode}; a cluster with token authentication "
            f"needs RAY_AUTH_MODE=token here too): {error}"
        ) from error


def stop_ray() -> None:
    """Leave the cluster; a private one ends with all its processes. Idempotent.

    Ray's own shutdown leaves agents behind for a while, or for good: they are waited for, then killed.
    """
    ours = [*_private, *(child for parent in _private for child in _children(parent))]
    _private.clear()
    ray.shutdown()
    _, alive = psutil.wait_procs(ours, timeout=AGENT_TIMEOUT_S)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=AGENT_TIMEOUT_S)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


class RayNodes:
    """Launches node processes at their places."""

    def __init__(
        self,
        wanted: Sequence[Wanted],
        registry: Registry,
        interface: str = "",
        identity: Identity = ROUTER,
        left: Kept | None = None,
    ) -> None:
        """wanted: the nodes to begin with. interface: of the nodes' addresses; empty: as their options say. identity:
        of who asks nodes whether they live. left: by an earlier supervisor, whose places are used on. Raises
        NodeUnavailable when Ray has no place for what the deployment cannot do without."""
        self._registry, self._interface, self._identity = registry, interface, identity
        # Names in Ray say whose they are. The rest is this start's own: what an earlier one left may linger.
        own = f"paceline-{registry.deployment}-{secrets.token_hex(4)}"
        self.name = left.ray_name if left is not None else own
        self._lifetime: Literal["detached"] | None = "detached" if registry.orphan_s else None
        self._with_standby = {node.node_id for node in wanted if node.standby}
        self._standbys: dict[str, tuple[int, RayNode]] = {}  # by node; with the generation that each is to be
        self._places = Places(self.name, wanted, self._lifetime, left.bundles if left is not None else None)

    def adopt(self, role: str, node_id: str, actor: Any) -> RayNode:
        """A process that an earlier supervisor left."""
        return RayNode(node_id, role, actor, self._identity)

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
            if not self._places.there(node_id):
                raise NotPlaced(f"{node_id} is not started: no host of the Ray cluster has room for it")
            node = self._process(role, node_id, generation, config)
        if node_id in self._with_standby:  # once the node runs, so that it starts no later for it
            node.on_started = lambda: self._stand_by(role, node_id, generation + 1, config)
        return node

    def _stand_by(self, role: str, node_id: str, generation: int, config: NodeConfig) -> None:
        try:
            standby = self._process(role, node_id, generation, config, outlives=False)
            self._standbys[node_id] = generation, standby
        except ray.exceptions.RayError as error:  # the node itself runs
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
        handle = actor.remote(role, node_id, generation, config, self._registry, self._interface, environment)
        return RayNode(node_id, role, handle, self._identity)

    def check_fits(self, node: Wanted) -> None:
        """Raise InvalidRequest where a node needs more than its place has, as in another role."""
        self._places.check_fits(node)

    def add(self, node: Wanted) -> None:
        """One more node may be launched."""
        self._places.add(node)

    def remove(self, node_id: str) -> None:
        """A node that has ended is launched no more."""
        self._with_standby.discard(node_id)
        _, standby = self._standbys.pop(node_id, (0, None))
        if standby is not None:
            standby.kill()
        self._places.remove(node_id)

    def close(self) -> None:
        """End the standbys and give the places back."""
        while self._standbys:
            self._standbys.popitem()[1][1].kill()
        self._places.close()


class RayNode:
    """One node process. Calls block, each with a deadline: run them in threads."""

    def __init__(self, node_id: str, role: str, actor: Any, identity: Identity = ROUTER) -> None:
        """identity: of who asks whether it lives."""
        self.node_id, self.role, self._identity = node_id, role, identity
        self.on_started: Callable[[], None] = lambda: None
        self._actor = actor
        self._asked: Any = None  # the answer to the latest ``answers``
        self._watch = actor.wait_stopped.remote()

    def start(self) -> str:
        """Start the node; returns its gRPC address. Raises the node's own PacelineError, else NodeUnavailable."""
        try:
            address: str = ray.get(self._actor.start.remote(), timeout=START_TIMEOUT_S + STOP_MARGIN_S)
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

    def status(self) -> dict[str, Any]:
        """What the node says of itself. Raises NodeUnavailable."""
        try:
            status: dict[str, Any] = ray.get(self._actor.status.remote(), timeout=STATUS_TIMEOUT_S)
        except ray.exceptions.RayError as error:
            raise NodeUnavailable(f"{self.node_id} does not answer: {error}") from error
        return status

    async def answers(self) -> bool:
        """Whether the process says that its engine loop ticks, and its gRPC server answers, within ASK_TIMEOUT_S."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                status = await self._ask_status()
                return status["alive"] and not status["fenced"] and await self._serves(status["address"])
        except (TimeoutError, ray.exceptions.RayError):
            return False

    async def _serves(self, address: str) -> bool:
        return await node_answers(self._identity, self.role, address)

    async def _ask_status(self) -> Any:
        """A process that is stopped has one question waiting at most."""
        if self._asked is None or ray.wait([self._asked], timeout=0)[0]:
            self._asked = self._actor.status.remote()
        return await asyncio.wrap_future(self._asked.future())

    def phase(self) -> str:
        """What its start is at; empty where it does not answer at once."""
        try:
            at: str = ray.get(self._actor.status.remote(), timeout=PHASE_TIMEOUT_S)["phase"]
        except ray.exceptions.RayError:
            return ""
        return at

    def died(self, timeout_s: float = 0.0) -> bool:
        """Whether the process is gone or was stopped; waits for it at most ``timeout_s``."""
        done, _ = ray.wait([self._watch], timeout=timeout_s)
        if not done:
            return False
        with suppress(ray.exceptions.RayError):  # it is gone
            if not ray.get(self._watch):  # it lives: another supervisor watched it meanwhile
                self._watch = self._actor.wait_stopped.remote()
                return False
        return True

    def stop(self, grace_s: float) -> None:
        """Drain and end; kills what does not end in time. Never raises."""
        try:
            ray.get(self._actor.stop.remote(grace_s), timeout=grace_s + 2 * STOP_MARGIN_S)
        except ray.exceptions.RayError as error:
            log.warning("%s did not stop by itself: %s", self.node_id, type(error).__name__)
        self.kill()

    def kill(self) -> None:
        """End the process now. Never raises; does nothing to one that is gone."""
        try:
            ray.kill(self._actor, no_restart=True)
        except (ValueError, ray.exceptions.RayError) as error:
            log.warning("%s could not be killed: %s", self.node_id, error)
