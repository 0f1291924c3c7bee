"""The page table of one sequence: which slot holds which position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator, PageRef


class PageTable:
    """Pages of one sequence, in order of position. The sequence owns one reference to each.

    Positions may be written only past the adopted pages, which other sequences read too. ``evict(n)`` is called
    when pages lack: it frees up to n pages that only a cache holds and returns how many (``PrefixCache.evict``).
    Not thread-safe: it belongs to its node's loop.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, evict: Callable[[int], int] | None = None, part: int = 0
    ) -> None:
        """part: of the pool, where all of its pages lie."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.pages: list[PageRef] = []
        self.page_size, self.part = page_size, part
        self._allocator = allocator
        self._evict = evict
        self._buffer = torch.empty(0, dtype=torch.int32)  # [at least capacity], doubled when full
        self._offsets = torch.arange(page_size, dtype=torch.int32)

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.pages) * self.page_size

    @property
    def slots(self) -> torch.Tensor:
        """Position -> slot: int32 [capacity], CPU. A view; valid until the table is released. A slot that it has named
        stays as it is, and lists that begin at the same address are of the same table."""
        return self._buffer[: self.capacity]

    def ensure(self, num_tokens: int) -> None:
        """Grow to hold ``num_tokens``, wholly or not at all. Raises Overloaded when neither the pool nor the
        cache has the pages."""
        missing = self._pages_for(num_tokens) - len(self.pages)
        if missing > 0:
            self._append(self._allocate(missing))

    def adopt(self, pages: Sequence[PageRef]) -> None:
        """Take over references to shared pages as the first positions (a prefix hit). The table must be empty."""
        if self.pages:
            raise ValueError(f"shared pages come first, but the table has {len(self.pages)} pages")
        for ref in pages:
            self._allocator.check(ref)
            if self._allocator.part_of(ref) != self.part:
                raise ValueError(f"{ref} is not of part {self.part} of the pool")
        self._append(pages)

    def release(self) -> None:
        """Release every page; the table is empty then and may be filled again. Nothing happens on a second call.

        A new list of slots begins: whoever keeps the old one never sees other pages in it.
        """
        pages, self.pages = self.pages, []
        self._buffer = torch.empty(0, dtype=torch.int32)
        self._allocator.release(pages)

    def _pages_for(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"num_tokens must not be negative, got {num_tokens}")
        return -(-num_tokens // self.page_size)

    def _allocate(self, n: int) -> list[PageRef]:
        try:
            return self._allocator.allocate(n, self.part)
        except Overloaded:
            if self._evict is None:
                raise
            self._evict(n - self._allocator.free_in(self.part))
        return self._allocator.allocate(n, self.part)

    def _append(self, pages: Sequence[PageRef]) -> None:
        start = self.capacity
        end = start + len(pages) * self.page_size
        if end > self._buffer.shape[0]:
            grown = torch.empty(max(end, 2 * self._buffer.shape[0]), dtype=torch.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        first = torch.tensor([ref.page for ref in pages], dtype=torch.int32) * self.page_size
        self._buffer[start:end] = (first[:, None] + self._offsets).view(-1)
        self.pages.extend(pages)
