"""Who holds which page of a pool.

A page is free, or held by one or more owners (sequences, the prefix cache, a transfer), each with one reference::

    free --allocate--> held (1) --share--> held (n) --release--> held (n-1) ... --release--> free, next generation

Each time a page becomes free its generation increases, so a reference from an earlier life is told from the present
one and refused.

The pages of a node whose ranks have pools of their own are in as many *parts*, one after another. Each has a free list.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import Overloaded, PacelineError


class StalePage(PacelineError):
    """A page reference that its holder no longer holds: given back before, or of another pool."""


@dataclass(frozen=True)
class PageRef:
    """A page during one of its lives."""

    page: int
    generation: int


class PageAllocator:
    """Hands out pages of a pool and counts references. Thread-safe; every call is all or nothing.

    Within a call each occurrence of a page counts for one reference. ``StalePage`` is raised for a reference
    that is not current and for giving back more references than are held.
    """

    def __init__(self, num_pages: int, parts: int = 1) -> None:
        """num_pages: of all parts, which have equally many."""
        if num_pages < 1 or parts < 1 or num_pages % parts:
            raise ValueError(f"num_pages must be at least 1 and a multiple of {parts} parts, got {num_pages}")
        self.num_pages, self.parts, self.part_pages = num_pages, parts, num_pages // parts
        self._lock = threading.Lock()
        # The page freed last goes out first: its memory is warm.
        self._free = [list(range(end - 1, end - self.part_pages - 1, -1)) for end in self._ends()]
        self._generation = [0] * num_pages
        self._refcount = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, of all parts."""
        return sum(map(len, self._free))

    def free_in(self, part: int) -> int:
        """The same of one part."""
        return len(self._free[part])

    def fits(self, n: int) -> int:
        """Runs of ``n`` pages, each of one part, that can be allocated now."""
        return sum(len(free) // n for free in self._free)

    def part_of(self, ref: PageRef) -> int:
        """Where a page lies."""
        return ref.page // self.part_pages

    def allocate(self, n: int, part: int = 0) -> list[PageRef]:
        """``n`` free pages of a part with one reference each. Raises Overloaded when fewer are free there."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        with self._lock:
            free = self._free[part]
            if n > len(free):
                raise Overloaded(f"{n} KV pages needed, {len(free)} of {self.part_pages} free")
            pages = [free.pop() for _ in range(n)]
            for page in pages:
                self._refcount[page] = 1
            return [PageRef(page, self._generation[page]) for page in pages]

    def share(self, pages: Sequence[PageRef]) -> None:
        """One more reference to each page."""
        with self._lock:
            self._check_all(pages)
            for ref in pages:
                self._refcount[ref.page] += 1

    def release(self, pages: Sequence[PageRef]) -> None:
        """Give back one reference to each page. A page without references becomes free, in its next generation."""
        with self._lock:
            self._check_owned(pages)
            for ref in pages:
                self._drop(ref.page)

    def check(self, *refs: PageRef) -> None:
        """Raise StalePage unless each of ``refs`` names a held page in its current generation."""
        with self._lock:
            self._check_all(refs)

    def refcount(self, ref: PageRef) -> int:
        """References to the page. Raises StalePage."""
        with self._lock:
            self._check_all([ref])
            return self._refcount[ref.page]

    def check_integrity(self, owned: Iterable[PageRef] | None = None) -> list[str]:
        """What is wrong with the books; empty when they are whole.

        owned: every reference held by any owner. When given, each page must have as many references as it has
        owners: none is lost, none is owned by someone who does not hold it.
        """
        with self._lock:
            problems = self._check_books()
            if owned is not None:
                problems += self._check_owners(list(owned))
            return problems

    def _check_books(self) -> list[str]:
        free: Counter[int] = Counter()
        problems = []
        for end, pages in zip(self._ends(), self._free, strict=True):
            own = range(end - self.part_pages, end)
            problems += [f"page {page} in the free list is not of the pool" for page in pages if page not in own]
            free.update(pages)
        problems += [f"page {page} is {count} times in the free list" for page, count in free.items() if count > 1]
        for page, references in enumerate(self._refcount):
            if page in free and references:
                problems.append(f"page {page} is free with {references} references")
            if page not in free and references < 1:
                problems.append(f"page {page} is lost: neither free nor referenced")
        return problems

    def _check_owners(self, owned: list[PageRef]) -> list[str]:
        problems = [f"an owner holds stale {ref}" for ref in owned if not self._current(ref)]
        owners = _count(owned)
        for page, references in enumerate(self._refcount):
            if owners[page] != references:
                problems.append(f"page {page} has {owners[page]} owners and {references} references")
        return problems

    def _current(self, ref: PageRef) -> bool:
        return (
            0 <= ref.page < self.num_pages
            and self._generation[ref.page] == ref.generation
            and self._refcount[ref.page] > 0
        )

    def _check_all(self, pages: Sequence[PageRef]) -> None:
        for ref in pages:
            if not self._current(ref):
                raise StalePage(f"{ref} is stale")

    def _check_owned(self, pages: Sequence[PageRef]) -> None:
        self._check_all(pages)
        for page, count in _count(pages).items():
            if count > self._refcount[page]:
                raise StalePage(f"page {page}: {count} references given back, {self._refcount[page]} held")

    def _drop(self, page: int) -> None:
        self._refcount[page] -= 1
        if self._refcount[page] == 0:
            self._generation[page] += 1
            self._free[page // self.part_pages].append(page)

    def _ends(self) -> range:
        """Past the last page of each part."""
        return range(self.part_pages, self.num_pages + 1, self.part_pages)


def _count(pages: Iterable[PageRef]) -> Counter[int]:
    return Counter(ref.page for ref in pages)
