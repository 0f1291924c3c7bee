"""The pages of a node, and in which part of its pool a sequence lives.

A pool has one part, or one on each rank where attention is data-parallel (docs/internals/parallel.md#sequences-dealt).
A sequence lives in one part from its first page to its end: a cached prefix draws it to the part where that lies, else
the part with the most room has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.kvcache.allocator import PageAllocator, PageRef
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable


@dataclass(frozen=True)
class KvMemory:
    """The pages of a node, who holds them, and which of them may be met again."""

    pool: KvPool
    allocator: PageAllocator
    prefix: PrefixCache | None

    def table(self, prefix: list[PageRef] | None = None) -> PageTable:
        """An empty table where the pages of ``prefix`` lie, else where there is the most room."""
        return self._in(self.allocator.part_of(prefix[0]) if prefix else self._by_room()[0][1])

    def elsewhere(self, table: PageTable, num_tokens: int) -> PageTable | None:
        """A table with room for ``num_tokens`` in another part than that of ``table``; None where no other has it."""
        needed = -(-num_tokens // table.page_size)
        for room, part in self._by_room():
            if part != table.part and room >= needed:
                found = self._in(part)
                found.ensure(num_tokens)
                return found
        return None

    def _by_room(self) -> list[tuple[int, int]]:
        """Pages that new sequences can get in each part, and the part; the most first."""
        parts, prefix = range(self.allocator.parts), self.prefix
        if len(parts) == 1:
            return [(0, 0)]  # who asks has no choice
        rooms = [self.allocator.free_in(part) + (prefix.idle(part) if prefix else 0) for part in parts]
        return sorted(
            ((room, part) for room, part in zip(rooms, parts, strict=True)), key=lambda one: (-one[0], one[1])
        )

    def _in(self, part: int) -> PageTable:
        prefix = self.prefix
        evict = None if prefix is None else lambda n: prefix.evict(n, part)
        return PageTable(self.allocator, self.pool.page_size, evict, part)
