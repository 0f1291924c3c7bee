"""What the registry knows of a node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class NodeRecord:
    """One node under a live lease. The first five fields name it; its LeaseKeeper fills the load at every renewal."""

    id: str  # e.g. "decode-0"; the same across restarts
    role: str  # "prefill" or "decode"
    generation: int  # grows with every restart; a lower one can never replace a higher one
    address: str  # host:port of its gRPC server
    state: str = "ready"  # or "draining"
    pid: int = 0
    hostname: str = ""
    started_at: float = 0.0  # Unix time
    model: str = ""
    fingerprint_digest: str = ""  # equal for two nodes exactly when they can pair
    log: str = ""  # file on its host that its stderr goes to
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    missing_drafts: int = 0  # sequences that came without the state of their drafter, since the node started
    refused_calls: int = 0  # whose caller may not make them, since the node started
    # Rounds in which a drafter that copies found something, and in which it did not, by its name; likewise.
    copies: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def with_load(self, load: Mapping[str, Any]) -> NodeRecord:
        """The same node with the fields of ``load``: from ``running`` on."""
        return replace(self, **load)

    def to_json(self) -> str:
        """The record as it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, body: str | bytes) -> NodeRecord:
        """Raises ValueError. A field that this version does not know is left out: nodes may be newer than routers."""
        content = json.loads(body)
        if not isinstance(content, dict):
            raise ValueError("a node's record must be a mapping")
        known = {known.name for known in fields(cls)}
        try:
            return cls(**{key: value for key, value in content.items() if key in known})
        except TypeError as error:  # a field without default is missing
            raise ValueError(str(error)) from None
