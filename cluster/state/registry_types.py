"""What the registry knows of a node, and where a deployment's registry is."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

DEFAULT_DEPLOYMENT = "default"

Count = Annotated[int, Field(ge=0)]


def namespace_of(deployment: str) -> str:
    """What every key of a deployment in Redis begins with."""
    return f"paceline:{deployment}"


DEFAULT_NAMESPACE = namespace_of(DEFAULT_DEPLOYMENT)


@dataclass(frozen=True)
class Registry:
    """Where the nodes of a deployment register, and for how long each time."""

    url: str  # of Redis
    lease_ttl_s: float
    deployment: str = DEFAULT_DEPLOYMENT
    orphan_s: float = 0.0  # a node ends after so long without supervisor, router and work; 0: it ends with its parent

    @property
    def namespace(self) -> str:
        """See ``namespace_of``."""
        return namespace_of(self.deployment)


@dataclass(frozen=True)
class NodeRecord:
    """One node under a live lease. The first five fields name it; its LeaseKeeper fills the load at every renewal."""

    id: str  # e.g. "decode-0"; the same across restarts
    role: Annotated[str, Field(pattern="^(prefill|decode)$")]
    generation: Annotated[int, Field(ge=0, lt=2**53)]  # grows with every restart; a lower one never replaces a higher
    address: Annotated[str, Field(pattern=r"^.+:\d{1,5}$")]  # host:port of its gRPC server
    state: Annotated[str, Field(pattern="^(ready|draining)$")] = "ready"
    pid: int = 0
    hostname: str = ""
    started_at: float = 0.0  # Unix time
    model: str = ""
    fingerprint_digest: str = ""  # equal for two nodes exactly when they can pair
    build: str = ""  # of Paceline
    mark: str = ""  # see ``marked``
    log: str = ""  # file on its host that its stderr goes to
    ranks: Count = 1  # processes that share its model
    running: Count = 0
    waiting: Count = 0
    free_pages: Count = 0
    total_pages: Count = 0
    missing_drafts: Count = 0  # sequences that came without the state of their drafter, since the node started
    shared_ms: Count = 0  # of steps that several threads shared, since the node started
    missed_ms: Count = 0  # of these in which one of them had no core
    refused_calls: Count = 0  # whose caller may not make them, since the node started
    refused_messages: Count = 0  # for what they say, likewise
    # Rounds in which a drafter that copies found something, and in which it did not, by its name; likewise.
    copies: Mapping[str, Annotated[Sequence[Count], Field(min_length=2, max_length=2)]] = field(default_factory=dict)

    def with_load(self, load: Mapping[str, Any]) -> NodeRecord:
        """The same node with the fields of ``load``: from ``running`` on."""
        return replace(self, **load)

    def marked(self, token: str) -> NodeRecord:
        """The same node with a proof that who wrote it down has the deployment's token: routers send that to its
        address."""
        return replace(self, mark=self._mark(token))

    def is_marked(self, token: str) -> bool:
        """Whether the record was ``marked`` with this token, for this address."""
        return hmac.compare_digest(self.mark.encode(), self._mark(token).encode())

    def _mark(self, token: str) -> str:
        said = json.dumps(["node", self.id, self.role, self.generation, self.address])
        return hmac.new(token.encode(), said.encode(), hashlib.sha256).hexdigest()

    def to_json(self) -> str:
        """The record as it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, body: str | bytes) -> NodeRecord:
        """Raises ValueError for what is no record, or has a field of a wrong type. A field that this version does not
        know is left out: nodes may be newer than routers."""
        return _RECORD.validate_json(body, strict=True)


_RECORD = TypeAdapter(NodeRecord)
