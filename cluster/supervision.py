"""This process's part as the one that supervises a deployment's nodes: it starts them, and operators change them."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import SecretStr

from cluster.nodes.addresses import host_answers
from cluster.nodes.changes import NodeChanges
from cluster.nodes.listening import split_address
from cluster.nodes.slots import Slot
from cluster.nodes.supervise import Supervisor
from cluster.parts import Parts
from cluster.serving_router import ServingRouter
from cluster.state.holder import DeploymentLease
from cluster.state.registry_types import Registry
from cluster.state.wanted import WantedNode, from_json
from paceline.config import NodeConfig, ServeConfig
from paceline.rpc.identity import Secret

if TYPE_CHECKING:
    from cluster.nodes.launch import RayNodes
    from cluster.nodes.places import Wanted

log = logging.getLogger(__name__)

PHASE_POLL_S = 0.5


class Supervision:
    """``start`` starts the nodes; they end with ``parts``."""

    def __init__(
        self, front: ServingRouter, secret: Secret, parts: Parts, lease: DeploymentLease, registry: Registry
    ) -> None:
        """front: has the deployment's options, and watches the nodes. lease: is held by this process."""
        self._front, self._secret, self._parts, self._lease = front, secret, parts, lease
        self._registry = registry
        self.config = front.config
        self.admin_address = ""

    async def start(self) -> None:
        """Start all nodes. Raises what the first failing one raised."""
        from cluster.nodes.launch import RayNode, RayNodes

        wanted = wanted_nodes(self.config, self._lease.wanted)
        make_config = self._node_config(len(wanted))
        with self._parts.waiting_for("Ray to place nodes"):
            nodes = await asyncio.to_thread(
                RayNodes,
                [placed(node, self.config) for node in wanted],
                self._registry,
                self.config.node_interface,
                self._front.identity,
            )
        self._parts.at_end("placement", nodes.close)

        def launch(role: str, node_id: str, generation: int) -> RayNode:
            return nodes.launch(role, node_id, generation, make_config(self.changes.of(node_id), role))

        # A node that stopped without dying is replaced too.
        directory = self._front.directory
        supervisor = self.supervisor = Supervisor(
            launch, issue=self._lease.issue, has_lease=directory.holds, heard=directory.heard, reachable=host_answers
        )
        supervisor.slots += [Slot(n.role, n.node_id, wish="rest" if n.drained else "run") for n in wanted]
        resources = {"prefill": self.config.prefill_resource, "decode": self.config.decode_resource}
        self.changes = NodeChanges(supervisor, _Places(nodes, self.config), wanted, self._lease.keep, resources)
        self._parts.at_end("nodes", lambda: supervisor.stop(self._parts.grace_s))
        told = asyncio.create_task(self._tell_phases(supervisor.slots))
        try:
            with self._parts.waiting_for(f"{len(wanted)} nodes"):
                await supervisor.start()
        finally:
            told.cancel()

    def _node_config(self, count: int) -> _NodeConfigs:
        """Options of the nodes. count: how many start together."""
        config = self.config
        threads = config.threads_per_node or max(1, (os.cpu_count() or 1) // count)
        shares = not config.threads_per_node and config.device == "cpu"
        log.info("%d nodes %s", count, "share their host's cores" if shares else f"with {threads} threads each")
        return _NodeConfigs(
            config.node(threads, secrets.token_hex(8) if shares else "", self._open_weight_file()), self._secret
        )

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
        from paceline.layers.weight_file import WeightFile, huge_pages_need_own_memory

        config = self.config
        if config.ray_address != "local" or config.device != "cpu" or huge_pages_need_own_memory():
            return ""
        try:
            file = WeightFile()
        except OSError as error:
            log.warning("each node keeps weights of its own: %s", error)
            return ""
        self._parts.at_end("weight file", file.close)
        return file.path

    async def open_admin(self) -> None:
        """Serve operators, where the options say so. Raises ConfigError for an address that cannot be had."""
        from cluster.frontdoor.service import operators_gate
        from cluster.nodes.admin import METHODS, AdminService, serve_admin

        config, front = self.config, self._front
        if not config.admin:
            return
        gate = operators_gate(METHODS, front.access)
        service = AdminService(self.changes, front.directory, config.drain_timeout_s)
        admin = await serve_admin(
            service,
            config.admin,
            front.identity,
            [gate],
            on_refused=lambda: front.metrics.access_refused("PermissionDenied"),
        )
        self._parts.at_end("admin", admin.stop)
        self.admin_address = f"{split_address(config.admin)[0]}:{admin.port}"


class _NodeConfigs:
    """Makes the options of each node."""

    def __init__(self, shared: NodeConfig, secret: Secret) -> None:
        self._shared, self._secret = shared, secret

    def __call__(self, node: WantedNode, role: str) -> NodeConfig:
        """With what the node proves itself with, and a decode node checks hand-offs with."""
        own = {"call_token": SecretStr(self._secret.call_token), "cores_slot": node.cores_slot}
        if role == "decode":
            own["ticket_key"] = SecretStr(self._secret.ticket_key)
        return self._shared.model_copy(update=own)


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
        found = from_json(kept)
    except ValueError as error:
        log.warning("the nodes that operators wanted are not known, those of the options are started: %s", error)
        return wanted
    if not any(node.role == "decode" and not node.drained for node in found):
        log.warning("no decode node was wanted when the last supervisor ended; those of the options are started")
        return wanted
    log.warning("operators wanted %d nodes before the last supervisor was lost; the options count no more", len(found))
    return found


def placed(node: WantedNode, config: ServeConfig) -> Wanted:
    """What Ray is asked for."""
    from cluster.nodes.places import Wanted

    # With several, another goes on with its streams; without prefill nodes, decode computes prompts.
    standby = config.standby and node.role == "decode" and config.decode_nodes == 1
    return Wanted(node.node_id, node.resource, standby, vital=node.role == "decode", host=node.host)


class _Places:
    """RayNodes, for what operators change."""

    def __init__(self, nodes: RayNodes, config: ServeConfig) -> None:
        self._nodes, self._config = nodes, config

    def add(self, node: WantedNode) -> None:
        self._nodes.add(replace(placed(node, self._config), standby=False))

    def remove(self, node_id: str) -> None:
        self._nodes.remove(node_id)
