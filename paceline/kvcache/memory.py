"""The pages of a node, and in which part of its pool a sequence lives.

A pool has one part, or one on each rank where attention is data-parallel (docs/internals/parallel.md#sequences-dealt).
A sequence lives in one part from its first page to its end: where there is the most room, and a cached page of its
prompt counts as one page of room. So a prefix draws its prompts, until another part is emptier by as many pages; then
that part computes it too, and has it from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable


@dataclass(frozen=True)
class KvMemory:
    """The pages of a node, who holds them, and which of them may be met again."""

    pool: KvPool
    allocator: PageAllocator
    prefix: PrefixCache | None

    def table(self, cached: Sequence[int] = ()) -> PageTable:
        """An empty table in the part for a new sequence. cached: pages of its prompt in the cache of each part."""
        rooms = self._rooms()
        wanted = [room + pages for room, pages in zip(rooms, cached, strict=True)] if cached else rooms
        return self._in(max(range(len(wanted)), key=wanted.__getitem__))

    def elsewhere(self, table: PageTable, num_tokens: int) -> PageTable | None:
        """A table with room for ``num_tokens`` in another part than that of ``table``; None where no other has it."""
        needed = -(-num_tokens // table.page_size)
        others = {part: room for part, room in enumerate(self._rooms()) if part != table.part and room >= needed}
        if not others:
            return None
        found = self._in(max(others, key=others.__getitem__))
        found.ensure(num_tokens)
        return found

    def _rooms(self) -> list[int]:
        """Pages that new sequences can get in each part."""
        allocator, prefix = self.allocator, self.prefix
        if allocator.parts == 1:
            return [0]  # who asks has no choice
        return [allocator.free_in(part) + (prefix.idle(part) if prefix else 0) for part in range(allocator.parts)]

    def _in(self, part: int) -> PageTable:
        prefix = self.prefix
        evict = None if prefix is None else lambda n: prefix.evict(n, part)
        return PageTable(self.allocator, self.pool.page_size, evict, part)
