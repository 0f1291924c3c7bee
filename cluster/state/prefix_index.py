"""Which node has how much of a prompt in its prefix cache: what the router knows of it. Pure, no Redis here.

Each generation of a node numbers its events from 1; a `NodeKeys` takes them in order and says when one is missing.
Then a snapshot, which carries the number of the last event that it contains, puts it right. The index is a hint: a
node may have dropped a page that is listed here, and matches for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from cluster.state.registry_types import NodeRecord
from paceline.kvcache.changes import CacheChanges
from paceline.kvcache.keys import KeyScheme

MAX_KEYS = 32_768  # kept of one node: 4 MB here, 512 KB as a snapshot
MAX_LOOKUP_PAGES = 2_048  # of one prompt: 5 ms

Kind = Literal["stored", "removed", "cleared"]
Key = tuple[str, int]  # node id and generation


@dataclass(frozen=True)
class CacheEvent:
    """One change of a node's prefix cache. ``cleared`` has no keys."""

    id: int  # 1 more than that of the event before it, within a generation
    kind: Kind
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All that a node's prefix cache holds after event ``id``."""

    id: int
    scheme: KeyScheme
    keys: tuple[bytes, ...]


def numbered(last_id: int, changes: CacheChanges) -> list[CacheEvent]:
    """The events that tell ``changes``, after the one of ``last_id``."""
    parts: list[tuple[Kind, tuple[bytes, ...]]] = [("cleared", ())] if changes.cleared else []
    if changes.removed:
        parts.append(("removed", changes.removed))
    if changes.stored:
        parts.append(("stored", changes.stored))
    return [CacheEvent(last_id + i, kind, keys) for i, (kind, keys) in enumerate(parts, 1)]


@dataclass
class NodeKeys:
    """What one generation of a node holds, as of event ``last_id``; no more than ``max_keys`` of it."""

    scheme: KeyScheme
    last_id: int
    keys: set[bytes] = field(default_factory=set)
    max_keys: int = MAX_KEYS

    @classmethod
    def of(cls, snapshot: Snapshot, max_keys: int = MAX_KEYS) -> NodeKeys:
        """What the snapshot says."""
        made = cls(snapshot.scheme, snapshot.id, max_keys=max_keys)
        made._store(snapshot.keys)
        return made

    def follow(self, events: Iterable[CacheEvent]) -> bool:
        """Take events in order; those that are known already change nothing. False at the first one before which
        another is missing: it and what follows is not taken."""
        for event in events:
            if event.id > self.last_id + 1:
                return False
            if event.id == self.last_id + 1:
                self._take(event)
                self.last_id = event.id
        return True

    def _take(self, event: CacheEvent) -> None:
        if event.kind == "cleared":
            self.keys.clear()
        elif event.kind == "removed":
            self.keys.difference_update(event.keys)
        else:
            self._store(event.keys)

    def _store(self, keys: Sequence[bytes]) -> None:
        room = self.max_keys - len(self.keys)
        self.keys.update(keys if len(keys) <= room else keys[: max(room, 0)])


class PrefixIndex:
    """The live nodes' keys. It answers nothing once nobody has ``confirm``ed it for a while: without news, what it
    holds is worth less with every second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._nodes: dict[Key, NodeKeys] = {}
        self._fresh_until = clock()

    def confirm(self, for_s: float) -> None:
        """What is here is up to date, and may be used for so many seconds."""
        self._fresh_until = self._clock() + for_s

    def put(self, node: Key, keys: NodeKeys) -> None:
        """What a node holds, in place of what was known."""
        self._nodes[node] = keys

    def get(self, node: Key) -> NodeKeys | None:
        """What is known of a node."""
        return self._nodes.get(node)

    def forget(self, node: Key) -> None:
        """Nothing is known of a node."""
        self._nodes.pop(node, None)

    def retain(self, alive: Collection[Key]) -> None:
        """Forget every other node, other generations of these too."""
        self._nodes = {node: keys for node, keys in self._nodes.items() if node in alive}

    def cached_tokens(self, nodes: Iterable[NodeRecord], token_ids: Sequence[int], salt: str) -> Mapping[Key, int]:
        """Tokens of the prompt that each node is thought to have cached, from its start; nodes with none are not
        listed. At most ``MAX_LOOKUP_PAGES`` pages, and not the last token: a forward needs one."""
        if self._clock() >= self._fresh_until:
            return {}
        groups: dict[KeyScheme, list[tuple[Key, set[bytes]]]] = {}
        for node in nodes:
            held = self._nodes.get((node.id, node.generation))
            if held is not None and held.keys:
                groups.setdefault(held.scheme, []).append(((node.id, node.generation), held.keys))
        found: dict[Key, int] = {}
        for scheme, group in groups.items():
            found.update(_longest(scheme, group, token_ids, salt))
        return found


def _longest(
    scheme: KeyScheme, group: list[tuple[Key, set[bytes]]], token_ids: Sequence[int], salt: str
) -> dict[Key, int]:
    """Keys are hashed only as far as some node has them."""
    num_pages = min(scheme.num_pages(len(token_ids), len(token_ids) - 1), MAX_LOOKUP_PAGES)
    found: dict[Key, int] = {}
    for page, key in enumerate(scheme.keys(token_ids, salt, num_pages), 1):
        group = [(node, keys) for node, keys in group if key in keys]
        if not group:
            break
        for node, _ in group:
            found[node] = page * scheme.page_size
    return found
