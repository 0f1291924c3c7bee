"""Prefix cache: whole pages of exact KV rows, found again by the tokens that determine them.

A target row at position i depends on tokens 0..i; a draft row also on the ``lookahead`` tokens after i
(algorithms.md E7). So two hashes are kept apart: the *chain* hash of all tokens up to a page's end, which links a
page to its parent, and the page's own *key*, the chain hash and the lookahead tokens that follow the page (keys.py).
A page's tokens and lookahead determine its ancestors' keys, so the cached pages form a forest.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.kvcache.allocator import PageAllocator, PageRef, StalePage
from paceline.kvcache.changes import CacheChanges, ChangeLog
from paceline.kvcache.keys import KeyScheme


@dataclass
class _Entry:
    page: PageRef  # one reference, owned by the cache
    parent: bytes | None  # key of the page before it; None at position 0
    num_children: int = 0  # cached pages that have this one as parent


class PrefixCache:
    """Least recently used whole pages, at most ``max_pages``; the cache owns one reference to each. Thread-safe.

    lookahead: the drafter's (``Drafter.lookahead``), 0 without draft rows. namespace: whatever else the rows
    depend on (model, revision, adapter, drafter). ``salt`` of a request separates tenants.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        lookahead: int,
        namespace: str,
        max_pages: int | None = None,
    ) -> None:
        max_pages = allocator.num_pages // 2 if max_pages is None else max_pages
        if page_size < 1 or lookahead < 0 or max_pages < 0:
            raise ValueError(f"bad page_size {page_size}, lookahead {lookahead} or max_pages {max_pages}")
        self.scheme = KeyScheme(page_size, lookahead, namespace)
        self.page_size = page_size
        self.lookahead = lookahead
        self.max_pages = max_pages
        self.hit_tokens = 0  # tokens that ``match`` found
        self.queried_tokens = 0  # tokens that ``match`` was asked for
        self._allocator = allocator
        self._lock = threading.Lock()
        self._changes = ChangeLog()
        # Least recently used first, and every page before its parent: one pass from the front finds victims.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    @property
    def num_pages(self) -> int:
        """Pages in the cache."""
        return len(self._entries)

    @property
    def pages(self) -> list[PageRef]:
        """References the cache owns."""
        with self._lock:
            return [entry.page for entry in self._entries.values()]

    def match(self, token_ids: Sequence[int], salt: str, max_tokens: int) -> tuple[list[PageRef], int]:
        """The longest cached run of whole pages from position 0, at most ``max_tokens``, and its tokens.

        The caller owns one reference to each page (``PageTable.adopt``). Pass ``len(prompt) - 1``: a forward
        needs at least one token. A page whose lookahead runs past ``token_ids`` cannot be looked up.
        """
        max_tokens = max(0, min(max_tokens, len(token_ids)))
        num_pages = self.scheme.num_pages(len(token_ids), max_tokens)
        with self._lock:
            found = self._cached_run(self.scheme.keys(token_ids, salt, num_pages))
            self._touch(found)
            pages = [self._entries[key].page for key in found]
            self._allocator.share(pages)
            num_tokens = len(pages) * self.page_size
            self.hit_tokens += num_tokens
            self.queried_tokens += max_tokens
        return pages, num_tokens

    def insert(self, token_ids: Sequence[int], pages: Sequence[PageRef], num_computed: int, salt: str) -> int:
        """Enter every whole page of a sequence whose rows are all exact (algorithms.md G3); returns how many are new.

        token_ids: committed tokens, prompt first. pages: the sequence's, from position 0. num_computed: valid
        target rows, whose draft rows were rewritten with true hidden states: module k of a chained drafter is
        then exact on rows up to num_computed - k (algorithms.md E9), which bounds what may enter.
        The cache takes its own reference to each new page. Where a key is cached already the first page stays, and
        where that lies in another part of the pool no page enters behind it: a run is of one part.
        """
        num_pages = self.scheme.num_pages(len(token_ids), min(num_computed, num_computed + 1 - self.lookahead))
        if num_pages > len(pages):
            raise ValueError(f"{num_pages} whole pages are computed but {len(pages)} were given")
        keys = list(self.scheme.keys(token_ids, salt, num_pages))
        with self._lock:
            present = self._cached_run(iter(keys))
            self._touch(present)
            last = present[-1] if present else None
            near = last is None or self._is_near(self._entries[last].page, pages[0])
            num_new = self._make_room(len(keys) - len(present), last) if near else 0
            start, end = len(present), len(present) + num_new
            self._allocator.share(pages[start:end])
            for i in range(start, end):
                parent = keys[i - 1] if i else None
                self._entries[keys[i]] = _Entry(pages[i], parent)
                if parent is not None:
                    self._entries[parent].num_children += 1
            self._changes.stored(keys[start:end])
            self._touch(keys[:end])
        return num_new

    def evict(self, n: int, part: int = 0) -> int:
        """Free up to ``n`` pages of a part that no one but the cache holds, least recently used first and no page
        before the cached pages that continue it. Returns how many."""
        with self._lock:
            return self._evict(n, None, part)

    def idle(self, part: int) -> int:
        """Pages of a part that ``evict`` could free."""
        with self._lock:
            pages = [entry.page for entry in self._entries.values()]
            return sum(
                1 for ref in pages if self._allocator.part_of(ref) == part and self._allocator.refcount(ref) == 1
            )

    def clear(self) -> None:
        """Forget every page. Those that a sequence holds live on with it."""
        with self._lock:
            self._allocator.release([entry.page for entry in self._entries.values()])
            self._entries.clear()
            self._changes.cleared()

    def take_changes(self, whole: bool, max_keys: int) -> CacheChanges:
        """What came and went since the last call, for one listener; with ``whole`` also all keys, at most
        ``max_keys``: those used last, none without the pages before it. From any thread."""

        def held() -> tuple[bytes, ...]:
            return tuple(self._entries)[max(0, len(self._entries) - max_keys) :]

        with self._lock:
            return self._changes.take(held, whole)

    def check_integrity(self) -> list[str]:
        """What is wrong with the cache; empty when it is whole."""
        with self._lock:
            problems = self._check_entries()
            if len(self._entries) > self.max_pages:
                problems.append(f"{len(self._entries)} pages exceed the limit of {self.max_pages}")
            distinct = len({entry.page.page for entry in self._entries.values()})
            if distinct != len(self._entries):
                problems.append(f"{len(self._entries)} entries share {distinct} pages")
        return problems

    def _check_entries(self) -> list[str]:
        problems: list[str] = []
        seen_children: dict[bytes, int] = {}
        seen: set[bytes] = set()
        for key, entry in self._entries.items():
            try:
                self._allocator.check(entry.page)
            except StalePage as error:
                problems.append(f"cached {error}")
            if entry.parent is not None and entry.parent not in self._entries:
                problems.append(f"{entry.page} has lost its parent")
            elif entry.parent is not None and not self._is_near(self._entries[entry.parent].page, entry.page):
                problems.append(f"{entry.page} lies in another part than its parent")
            if entry.parent in seen:
                problems.append(f"{entry.page} would outlive its parent")
            if seen_children.get(key, 0) != entry.num_children:
                problems.append(f"{entry.page} counts {entry.num_children} children, not {seen_children.get(key, 0)}")
            if entry.parent is not None:
                seen_children[entry.parent] = seen_children.get(entry.parent, 0) + 1
            seen.add(key)
        return problems

    def _cached_run(self, keys: Iterator[bytes]) -> list[bytes]:
        run: list[bytes] = []
        for key in keys:
            if key not in self._entries:
                break
            run.append(key)
        return run

    def _is_near(self, one: PageRef, other: PageRef) -> bool:
        return self._allocator.part_of(one) == self._allocator.part_of(other)

    def _touch(self, run: Sequence[bytes]) -> None:
        """Mark pages 0.. of one sequence as just used, the deepest first so that each stays before its parent."""
        for key in reversed(run):
            self._entries.move_to_end(key)

    def _make_room(self, num_new: int, parent: bytes | None) -> int:
        """How many of ``num_new`` pages fit after eviction; ``parent``, which the first of them continues, stays."""
        excess = len(self._entries) + num_new - self.max_pages
        if excess > 0:
            self._evict(excess, parent)
        return min(num_new, self.max_pages - len(self._entries))

    def _evict(self, n: int, keep: bytes | None, part: int | None = None) -> int:
        victims: list[tuple[bytes, _Entry]] = []
        for key, entry in self._entries.items():
            if len(victims) >= n:
                break
            if key == keep or entry.num_children or self._allocator.refcount(entry.page) > 1:
                continue
            if part is not None and self._allocator.part_of(entry.page) != part:
                continue
            victims.append((key, entry))
            if entry.parent is not None:
                self._entries[entry.parent].num_children -= 1
        for key, _ in victims:
            del self._entries[key]
        self._changes.removed(key for key, _ in victims)
        self._allocator.release([entry.page for _, entry in victims])
        return len(victims)
