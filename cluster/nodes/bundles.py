"""What a node needs of a host, what the hosts have, and whether it fits: nothing here asks Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError

HOST_SHARE = 0.001  # of the resource that names a host
GPU, CPU = "GPU", "CPU"  # Ray's names of the resources
CPU_SHARE = 0.01  # of a node of one rank, which pins its own threads; Ray only has to place it
MAX_HOSTS_TOLD = 8  # in an error


@dataclass(frozen=True)
class Wanted:
    """A node that is to run for the life of the deployment, over generations."""

    node_id: str
    resource: str = ""  # Ray resource of which it takes 1; empty: it may run on any host
    standby: bool = False  # beside it a process waits that has all but the model, to be its next generation
    vital: bool = False  # one of these at least must run
    host: str = ""  # address of the only host that it may run on; empty: any
    gpus: int = 0  # that it has for itself, one for each rank; Ray chooses them
    cpus: float = CPU_SHARE

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray is to keep for it, on one host."""
        there = {f"node:{self.host}": HOST_SHARE} if self.host else {}  # Ray gives every host a resource of this name
        gpu = {GPU: float(self.gpus)} if self.gpus else {}
        return {CPU: self.cpus} | ({self.resource: 1.0} if self.resource else {}) | there | gpu


@dataclass(frozen=True)
class Host:
    """A host of a Ray cluster."""

    address: str
    resources: Mapping[str, float]  # all that it has
    free: Mapping[str, float]  # what nobody keeps
    gpu_memory_gib: float = 0.0  # of one GPU; 0: not known
    memory_gib: float = 0.0  # of the host; 0: not known
    nodes: list[Wanted] = field(default_factory=list)  # placed here by ``place``

    def marked_for(self, node: Wanted) -> bool:
        """Whether it is a host of the node's kind, however much it has."""
        marks = [name for name in node.bundle if name != CPU]
        return all(self.resources.get(name, 0) > 0 for name in marks)

    def holds(self, node: Wanted, there: Mapping[str, float]) -> bool:
        """Whether the node fits into ``there`` beside those placed here."""
        return all(there.get(name, 0) - self._taken(name) >= share for name, share in node.bundle.items())

    def left(self, name: str, *, empty: bool) -> float:
        """How much of a resource the nodes placed here leave. empty: as if nothing else ran here."""
        return (self.resources if empty else self.free).get(name, 0) - self._taken(name)

    def _taken(self, name: str) -> float:
        return sum(node.bundle.get(name, 0) for node in self.nodes)

    def told(self, names: Sequence[str]) -> str:
        """Address, and what it has of some resources."""
        has = [f"{self.free.get(name, 0):g} of {self.resources.get(name, 0):g} {name} free" for name in names]
        return f"{self.address} has {', '.join(has)}"


def place(wanted: Sequence[Wanted], hosts: Sequence[Host], *, empty: bool = False) -> list[Wanted]:
    """Put every node onto the host with the fewest nodes that has room, of these the one with the fewest GPUs left, the
    largest nodes first; returns those without a host. empty: as if nothing else ran on the hosts. It is what Ray's
    SPREAD does too where there is one way."""
    left = []
    for node in sorted(wanted, key=lambda node: (-node.gpus, -node.cpus, not node.vital)):
        fits = [host for host in hosts if host.holds(node, host.resources if empty else host.free)]
        if fits:
            min(fits, key=lambda host: (len(host.nodes), host.left(GPU, empty=empty))).nodes.append(node)
        else:
            left.append(node)
    return left


def check_room(wanted: Sequence[Wanted], hosts: Sequence[Host], *, fixed: bool) -> None:
    """Raise ConfigError for a node that no host of its kind could ever hold, though it were empty. Hosts of its kind
    that are not there yet are waited for elsewhere. fixed: no host will come, so all must fit together."""
    for node in wanted:
        kind = [host for host in hosts if host.marked_for(node)]
        if (kind or fixed) and not any(all(h.resources.get(n, 0) >= s for n, s in node.bundle.items()) for h in kind):
            raise _too_small(node, kind or hosts)
    if fixed and (left := place(wanted, [Host(host.address, host.resources, {}) for host in hosts], empty=True)):
        raise _too_small(left[0], hosts, beside=len(wanted) - 1)


def _too_small(node: Wanted, hosts: Sequence[Host], beside: int = 0) -> ConfigError:
    role = node.node_id.partition("-")[0]
    asked = [name for name, share in node.bundle.items() if share != CPU_SHARE]
    needs = ", ".join(f"{node.bundle[name]:g} {name}" for name in asked)
    others = f" beside {beside} other nodes" if beside else ""
    hint = "; --device cuda:0 lets the nodes of a host share its first GPU" if node.gpus == 1 else ""
    key = f"{role}_tp" if max(node.gpus, node.cpus) > 1 else "device" if node.gpus else f"{role}_resource"
    return ConfigError(key, f"{node.node_id} needs {needs} on one host{others}: {where(hosts, asked)}{hint}")


def where(hosts: Sequence[Host], names: Sequence[str] = (GPU, CPU)) -> str:
    """What the hosts have of some resources, in a line."""
    more = [f"{len(hosts) - MAX_HOSTS_TOLD} more hosts"] if len(hosts) > MAX_HOSTS_TOLD else []
    return "; ".join([*(host.told(names) for host in hosts[:MAX_HOSTS_TOLD]), *more]) or "there is no host"
