"""Which nodes a deployment is to have, and where they run: what its next supervisor goes on with.

It lies in the hash of the deployment's holder. An orderly stop removes it: the next start has what its options say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

MAX_NODES = 128  # of a deployment
NodeId = Annotated[str, Field(pattern=r"^(prefill|decode)-\d{1,4}$")]


@dataclass(frozen=True)
class WantedNode:
    """A node that is to run over generations, or that an operator has drained."""

    node_id: NodeId
    role: Annotated[str, Field(pattern="^(prefill|decode)$")]
    resource: str = ""  # Ray resource of which it takes 1; empty: it may run on any host
    host: str = ""  # address by which Ray knows the one host that it may run on
    cores_slot: Annotated[int, Field(ge=0, le=255)] = 0  # its number among the nodes that share cores
    drained: bool = False


@dataclass(frozen=True)
class Kept:
    """What a supervisor leaves to the next one."""

    nodes: Annotated[list[WantedNode], Field(max_length=MAX_NODES)]
    ray_name: str = ""  # of the nodes that outlive their supervisor; empty: they end with it
    bundles: dict[str, int] = field(default_factory=dict)  # of these, by node: its place in the group of all
    options: str = ""  # digest of what they were started with

    def to_json(self) -> bytes:
        """As it lies in Redis."""
        return _KEPT.dump_json(self)


_KEPT = TypeAdapter(Kept)


def from_json(body: bytes) -> Kept:
    """Raises ValueError for what no supervisor kept, or names a node twice."""
    try:
        kept = _KEPT.validate_json(body)
    except ValidationError as error:
        raise ValueError(f"no list of wanted nodes: {error}") from None
    if len({node.node_id for node in kept.nodes}) != len(kept.nodes):
        raise ValueError("a list of wanted nodes names one twice")
    return kept
