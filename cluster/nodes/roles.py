"""What nodes of each role are started with, and what Ray is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import SecretStr

from cluster.nodes.bundles import CPU_SHARE, Wanted
from cluster.state.wanted import WantedNode
from paceline.config import NodeConfig, ServeConfig
from paceline.role_options import ROLES, Role
from paceline.rpc.identity import Secret


@dataclass(frozen=True)
class Shares:
    """What the nodes of this start have of their hosts."""

    threads: int  # of each rank, where the options give a node none
    cores_group: str  # of the nodes that share their host's cores
    weight_file: str  # of the nodes that have their weights together

    @classmethod
    def of(cls, config: ServeConfig, wanted: Sequence[WantedNode], group: str, weight_file: str) -> Shares:
        """group: names those that share cores. weight_file: empty where each has its own weights."""
        ranks = sum(config.of_role(cast(Role, node.role)).tp for node in wanted)
        return cls(max(1, (os.cpu_count() or 1) // max(1, ranks)), group, weight_file)


def shares_cores(config: ServeConfig) -> bool:
    """Whether nodes of a role use the cores of those that are idle. config: the role's. Ranks of one node wait for each
    other at every layer, so each keeps to threads of its own."""
    return not config.threads_per_node and config.device == "cpu" and config.tp == 1


def has_weights_together(config: ServeConfig) -> bool:
    """Whether nodes of a role may have one copy of the weights on a host. config: the role's. Ranks have each a part of
    their own."""
    return config.device == "cpu" and config.tp == 1


class NodeConfigs:
    """Makes the options of each node."""

    def __init__(self, config: ServeConfig, shares: Shares, secret: Secret) -> None:
        self._secret = secret
        self._of = {role: _node_config(config.of_role(role), shares) for role in ROLES}

    def __call__(self, node: WantedNode, role: str) -> NodeConfig:
        """With what the node proves itself with, and a decode node checks hand-offs with."""
        own = {"call_token": SecretStr(self._secret.call_token), "cores_slot": node.cores_slot}
        if role == "decode":
            own["ticket_key"] = SecretStr(self._secret.ticket_key)
        return self._of[cast(Role, role)].model_copy(update=own)


def _node_config(config: ServeConfig, shares: Shares) -> NodeConfig:
    """config: the role's."""
    threads = config.threads_per_node or shares.threads * config.tp
    group = shares.cores_group if shares_cores(config) else ""
    return config.node(threads, group, shares.weight_file if has_weights_together(config) else "")


def wanted_place(node: WantedNode, config: ServeConfig) -> Wanted:
    """What Ray is asked for. Ranks of a node are on one host, so it is one bundle for all of them."""
    own = config.of_role(cast(Role, node.role))
    gpus = own.tp if own.device == "cuda" else 0
    # With several, another goes on with its streams; without prefill nodes, decode computes prompts. A process has all
    # GPUs of its node or none, so nothing can wait beside a node that has several.
    standby = config.standby and node.role == "decode" and config.decode_nodes == 1 and gpus < 2
    # A private Ray starts a worker for every CPU; on a machine of one's own nobody else is placed.
    counted = own.tp > 1 and not gpus and config.ray_address != "local"
    cpus = float(max(own.tp, own.threads_per_node)) if counted else CPU_SHARE
    return Wanted(
        node.node_id, node.resource, standby, vital=node.role == "decode", host=node.host, gpus=gpus, cpus=cpus
    )
