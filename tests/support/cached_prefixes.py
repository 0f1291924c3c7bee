"""A node's prefix cache and what publishes it, without the node."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.state.cache_events import CachePublisher
from cluster.state.registry_types import NodeRecord
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.changes import MAX_CHANGES, ChangeLog
from paceline.kvcache.prefix import PrefixCache

PAGE = 4


def prompt(number: int) -> tuple[int, ...]:
    """Three whole pages and one token, of its own from the start."""
    return tuple(100 * number + i for i in range(3 * PAGE + 1))


class Holder:
    """One node, over its generations. Room for four prompts unless told otherwise."""

    def __init__(
        self,
        url: str,
        ttl_s: float,
        node_id: str = "decode-0",
        num_pages: int = 24,
        max_changes: int = MAX_CHANGES,
    ) -> None:
        self._url, self._ttl_s, self._node_id = url, ttl_s, node_id
        self._num_pages, self._max_changes = num_pages, max_changes
        self.generation = 0
        self.restart()

    def restart(self) -> None:
        """The next generation, with nothing cached; the one before just stops to speak."""
        self.generation += 1
        self.name = self._node_id, self.generation
        self.record = NodeRecord(self._node_id, self._node_id.partition("-")[0], self.generation, "h:1")
        self.allocator = PageAllocator(self._num_pages)
        self.cache = PrefixCache(self.allocator, PAGE, 0, "model")
        self.cache._changes = ChangeLog(self._max_changes)
        self.publisher = CachePublisher(self._url, self.name, self.cache, self._ttl_s)

    def add(self, token_ids: Sequence[int], salt: str = "") -> None:
        """A sequence of these tokens came and went."""
        need = -(-len(token_ids) // PAGE)
        self.cache.evict(need - self.allocator.num_free)
        pages = self.allocator.allocate(need)
        self.cache.insert(token_ids, pages, len(token_ids), salt)
        self.allocator.release(pages)

    def keys(self) -> set[bytes]:
        """What the cache holds."""
        return set(self.cache._entries)
