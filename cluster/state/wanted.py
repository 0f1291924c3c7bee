"""Which nodes a deployment is to have, when operators changed what its options say.

The list lies in the hash of the deployment's holder, so that whoever supervises next starts the same nodes. An orderly
stop removes it: the next start has what its options say again.
"""

from __future__ import annotations

from dataclasses import dataclass
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


_WANTED = TypeAdapter(Annotated[list[WantedNode], Field(max_length=MAX_NODES)])


def to_json(wanted: list[WantedNode]) -> bytes:
    """As it lies in Redis."""
    return _WANTED.dump_json(wanted)


def from_json(body: bytes) -> list[WantedNode]:
    """Raises ValueError for what is no list of nodes, or names one of them twice."""
    try:
        wanted = _WANTED.validate_json(body)
    except ValidationError as error:
        raise ValueError(f"no list of wanted nodes: {error}") from None
    if len({node.node_id for node in wanted}) != len(wanted):
        raise ValueError("a list of wanted nodes names one twice")
    return wanted
