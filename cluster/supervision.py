"""This process's part as the one that supervises a deployment's nodes: it starts them, and operators change them."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from cluster.nodes.addresses import host_answers
from cluster.nodes.bundles import check_room
from cluster.nodes.changes import NodeChanges
from cluster.nodes.listening import split_address
from cluster.nodes.roles import NodeConfigs, Shares, has_weights_together, shares_cores, wanted_place
from cluster.nodes.slots import Slot
from cluster.nodes.supervise import Supervisor
from cluster.option_sets import NODE_OPTIONS
from cluster.parts import Parts
from cluster.role_check import check_prefill_may_come
from cluster.serving_router import ServingRouter
from cluster.state.holder import DeploymentLease
from cluster.state.wanted import Kept, WantedNode, from_json
from paceline.config import ServeConfig
from paceline.role_options import ROLES
from paceline.rpc.identity import Secret
from paceline.v1.admin_pb2_grpc import AdminServicer

if TYPE_CHECKING:
    from cluster.nodes.admin import AdminServer
    from cluster.nodes.launch import RayNode, RayNodes

log = logging.getLogger(__name__)

PHASE_POLL_S = 0.5
ORPHAN_S = 60.0  # nodes that outlive their supervisor end after so long without another, a router and work


class Supervision:
    """``start`` starts the nodes; they end with ``parts``."""

    def __init__(
        self,
        front: ServingRouter,
        secret: Secret,
        parts: Parts,
        lease: DeploymentLease,
        config: ServeConfig,
        leaves: bool = False,
    ) -> None:
        """front: watches the nodes. lease: is held by this process. config: all options of the deployment. leaves: the
        nodes go on when this process ends in order; where they cannot outlive it, they end all the same."""
        self._front, self._secret, self._parts, self._lease = front, secret, parts, lease
        self._outlive = nodes_outlive(config)
        self._registry = replace(front.registry, orphan_s=ORPHAN_S if self._outlive else 0.0)
        self.config, self._leaves = config, leaves and self._outlive
        self.admin_address = ""

    async def start(self) -> None:
        """Go on with the nodes that an earlier supervisor left, and start the others. Raises what the first failing one
        raised."""
        # Ray takes a second to import; a router that takes over has streams meanwhile.
        await asyncio.to_thread(importlib.import_module, "cluster.nodes.launch")
        from cluster.nodes.ray_session import CALL_S, within
        from cluster.nodes.ray_watch import RayWatch

        left = await asyncio.to_thread(within, CALL_S, self._left)
        leaves, self._leaves = self._leaves, self._leaves or left is not None  # a start that fails ends none of theirs
        wanted = list(left.nodes) if left is not None else wanted_nodes(self.config, self._lease.wanted)
        nodes = self._nodes = await self._place(wanted, left)
        supervisor = self.supervisor = self._supervisor(wanted, nodes)
        self._parts.at_end("nodes", self._end)
        if left is not None:
            await asyncio.to_thread(within, CALL_S, self._adopt)
        if self._outlive:
            await asyncio.to_thread(self._keep, wanted)  # before a process that could outlive this one
        told = asyncio.create_task(self._tell_phases(supervisor.slots))
        try:
            with self._parts.waiting_for(f"{len(wanted)} nodes"):
                await supervisor.start()
        finally:
            told.cancel()
        self._leaves, nodes.patient = leaves, False
        watch = RayWatch(supervisor, nodes, self._front.directory.refresh, self._keep_on, self._tell_trouble)
        watching = asyncio.create_task(watch.run(), name="watch-ray")
        self._parts.at_end("watching Ray", watching.cancel)

    async def _place(self, wanted: list[WantedNode], left: Kept | None) -> RayNodes:
        """The placement of ``wanted`` on Ray: a new one, or the one that was left. It ends with ``parts``."""
        from cluster.nodes.launch import PLACE_S, RayNodes
        from cluster.nodes.places import ray_hosts
        from cluster.nodes.ray_session import CALL_S, within

        places = [wanted_place(node, self.config) for node in wanted]
        with self._parts.waiting_for("Ray to place nodes"):
            if left is None:
                hosts = await asyncio.to_thread(within, CALL_S, ray_hosts)
                check_room(places, hosts, fixed=self.config.ray_address == "local")
            interface, identity, directory = self.config.node_interface, self._front.identity, self._front.directory
            nodes = await asyncio.to_thread(
                within, PLACE_S, lambda: RayNodes(places, self._registry, interface, identity, left, directory.record)
            )
        self._parts.at_end("placement", lambda: None if self._goes_on() else nodes.close())
        return nodes

    def _supervisor(self, wanted: list[WantedNode], nodes: RayNodes) -> Supervisor:
        """Starts and replaces ``wanted``, and takes changes of them. A node that stopped without dying is replaced
        too."""
        make_config = self._node_configs(wanted, nodes.name.rpartition("-")[2])
        directory = self._front.directory

        def launch(role: str, node_id: str, generation: int) -> RayNode:
            return nodes.launch(role, node_id, generation, make_config(self.changes.of(node_id), role))

        supervisor = Supervisor(
            launch,
            issue=self._lease.issue,
            has_lease=directory.holds,
            heard=directory.heard,
            ended=directory.ended,
            reachable=host_answers,
            may_act=self._lease.held if self._outlive else lambda: True,
        )
        supervisor.slots += [Slot(n.role, n.node_id, wish="rest" if n.drained else "run") for n in wanted]
        resources = {"prefill": self.config.prefill_resource, "decode": self.config.decode_resource}
        self.changes = NodeChanges(supervisor, _Places(nodes, self.config), wanted, self._keep, resources)
        return supervisor

    def _left(self) -> Kept | None:
        """What an earlier supervisor left, where its nodes outlived it and were started as these would be. Others of
        its nodes are ended."""
        from cluster.nodes.left import end_all

        if not self._outlive or not self._lease.wanted:
            return None
        try:
            kept = from_json(self._lease.wanted)
        except ValueError as error:
            log.warning("what the last supervisor left is not known: %s", error)
            return None
        if not kept.ray_name:
            return None
        if kept.options != options_digest(self.config, self._secret):
            log.warning("nodes of the last supervisor have other options; they are ended")
            end_all(kept.ray_name)
            self._lease.wanted = b""
            return None
        return kept

    def _adopt(self) -> None:
        from cluster.nodes.left import find_left

        slots = {slot.node_id: slot for slot in self.supervisor.slots}
        for node_id, (status, actor) in find_left(
            self._nodes.name, {name: slot.role for name, slot in slots.items()}
        ).items():
            slot, generation = slots[node_id], status["generation"]
            handle = self._nodes.adopt(slot.role, node_id, generation, actor)
            slot.adopt(handle, generation, status["address"], self.supervisor.clock())
            log.warning("%s generation %d at %s is supervised from here now", node_id, generation, slot.address)

    def _keep(self, wanted: list[WantedNode]) -> None:
        """For whoever supervises next."""
        outlive = self._outlive
        kept = Kept(
            wanted,
            self._nodes.name if outlive else "",
            self._nodes.bundles() if outlive else {},
            options_digest(self.config, self._secret) if outlive else "",
        )
        self._lease.keep(kept.to_json())

    def _tell_trouble(self, trouble: str) -> None:
        self._front.trouble = trouble

    def _keep_on(self) -> None:
        """Places are others."""
        if self._outlive:
            self._keep(self.changes.wanted)

    def _goes_on(self) -> bool:
        """Whether the nodes live on when this process ends: another supervises, or is to."""
        return self._outlive and (self._leaves or not self._lease.held())

    async def _end(self) -> None:
        self._leaves = self._lease.leaves = self._goes_on()  # nobody would look after nodes that nobody wants
        await self.supervisor.stop(None if self._leaves else self._parts.grace_s)

    def _node_configs(self, wanted: list[WantedNode], group: str) -> NodeConfigs:
        """Options of the nodes. wanted: those that start together. group: names those that share cores."""
        config, roles = self.config, {node.role for node in wanted}
        shares = Shares.of(config, wanted, group, self._open_weight_file())
        for role in ROLES:
            if role in roles:
                own = config.of_role(role)
                threads = f"{own.threads_per_node or shares.threads * own.tp} threads each, {own.tp} ranks"
                log.info("%s nodes: %s", role, "they share their host's cores" if shares_cores(own) else threads)
        return NodeConfigs(config, shares, self._secret)

    async def _tell_phases(self, slots: list[Slot]) -> None:
        """Tell what each node that has not started is at, until cancelled."""
        from cluster.nodes.launch import RayNode

        while self._parts.tell is not None:
            await asyncio.sleep(PHASE_POLL_S)
            nodes = [slot.handle for slot in slots if not slot.address and isinstance(slot.handle, RayNode)]
            phases = await asyncio.gather(*(asyncio.to_thread(node.phase) for node in nodes))
            details = [f"{node.node_id} is {at}" for node, at in zip(nodes, phases, strict=True) if at]
            self._parts.tell(f"{len(slots)} nodes", ", ".join(details))

    def _open_weight_file(self) -> str:
        """Path of the memory file for the nodes' weights; empty where they are on other hosts, or each is better off
        with weights of its own."""
        from paceline.layers.weight_file import WeightFile

        config = self.config
        together = any(has_weights_together(config.of_role(role)) for role in ROLES)
        if config.ray_address != "local" or not together or not self._shares_weights():
            return ""
        try:
            file = WeightFile()
        except OSError as error:
            log.warning("each node keeps weights of its own: %s", error)
            return ""
        self._parts.at_end("weight file", file.close)
        return file.path

    def _shares_weights(self) -> bool:
        from paceline.layers.weight_file import copies_fit, huge_pages_need_own_memory
        from paceline.models.hub import resolve_model
        from paceline.models.weight_files import gguf_file, gguf_parts, weight_files

        config = self.config
        if config.share_weights != "auto":
            return config.share_weights == "on"
        if not huge_pages_need_own_memory():
            return True
        folder = resolve_model(config.model)
        gguf = gguf_file(folder)
        files = gguf_parts(gguf) if gguf else weight_files(folder)
        size = sum(file.stat().st_size for file in files)
        available = psutil.virtual_memory().available
        return not copies_fit(size, config.prefill_nodes + config.decode_nodes, available)

    async def open_admin(self) -> None:
        """Serve operators, where the options say so. Raises ConfigError for an address that cannot be had."""
        from cluster.nodes.admin import AdminService

        if not self.config.admin:
            return
        service = AdminService(self.changes, self._front.directory, self.config.drain_timeout_s)
        admin = await open_admin(service, self._front, self.config.admin)
        self._parts.at_end("admin", admin.stop)
        self.admin_address = f"{split_address(self.config.admin)[0]}:{admin.port}"
        self._lease.serves_operators(self.admin_address)
        log.info("operators are served at %s", self.admin_address)


async def open_admin(service: AdminServicer, front: ServingRouter, address: str) -> AdminServer:
    """Let ``service`` answer operators at "host:port". Raises ConfigError for an address that cannot be had."""
    from cluster.frontdoor.service import operators_gate
    from cluster.nodes.admin import METHODS, serve_admin

    return await serve_admin(
        service,
        address,
        front.identity,
        [operators_gate(METHODS, front.access)],
        on_refused=lambda: front.metrics.access_refused("PermissionDenied"),
        on_failed=front.handshakes("gRPC"),
    )


def nodes_outlive(config: ServeConfig) -> bool:
    """Whether Ray and Redis live on when this process ends."""
    return config.ray_address != "local" and bool(config.redis)


def wanted_nodes(config: ServeConfig, kept: bytes) -> list[WantedNode]:
    """What the options say; or what operators wanted of a supervisor that did not end in order. kept: theirs."""
    roles = [
        ("prefill", config.prefill_nodes, config.prefill_resource),
        ("decode", config.decode_nodes, config.decode_resource),
    ]
    named = [WantedNode(f"{role}-{i}", role, resource) for role, count, resource in roles for i in range(count)]
    wanted = [replace(node, cores_slot=number) for number, node in enumerate(named)]
    if not kept:
        return wanted
    try:
        found = list(from_json(kept).nodes)
    except ValueError as error:
        log.warning("the nodes that operators wanted are not known, those of the options are started: %s", error)
        return wanted
    if not any(node.role == "decode" and not node.drained for node in found):
        log.warning("no decode node was wanted when the last supervisor ended; those of the options are started")
        return wanted
    log.warning("operators wanted %d nodes before the last supervisor was lost; the options count no more", len(found))
    return found


class _Places:
    """RayNodes, for what operators change."""

    def __init__(self, nodes: RayNodes, config: ServeConfig) -> None:
        self._nodes, self._config = nodes, config

    def add(self, node: WantedNode) -> None:
        self._check_role(node)
        self._nodes.add(replace(wanted_place(node, self._config), standby=False))

    def check_fits(self, node: WantedNode) -> None:
        self._check_role(node)
        self._nodes.check_fits(wanted_place(node, self._config))

    def _check_role(self, node: WantedNode) -> None:
        if node.role == "prefill":
            check_prefill_may_come(self._config)

    def remove(self, node_id: str) -> None:
        self._nodes.remove(node_id)


def options_digest(config: ServeConfig, secret: Secret) -> str:
    """Names what nodes are started with: options that were chosen, so that two builds agree though one has more."""
    options = config.model_dump(include=NODE_OPTIONS.intersection(config.chosen), exclude_none=True, mode="json")
    known = json.dumps([options, secret.call_token], sort_keys=True)
    return hashlib.sha256(known.encode()).hexdigest()[:16]
