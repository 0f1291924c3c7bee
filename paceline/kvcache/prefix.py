"""Prefix cache: whole pages of exact KV rows, found again by the tokens that determine them.

A target row at position i depends on tokens 0..i; a draft row also on the ``lookahead`` tokens after i
(algorithms.md E7). So two hashes are kept apart: the *chain* hash of all tokens up to a page's end, which links a
page to its parent, and the page's own *key*, the chain hash and the lookahead tokens that follow the page (keys.py).
A page's tokens and lookahead determine its ancestors' keys, so the cached pages form a forest. A pool of several parts
has a forest in each of them: a sequence finds what lies in its own part.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.kvcache.allocator import PageAllocator, PageRef, StalePage
from paceline.kvcache.changes import CacheChanges, ChangeLog
from paceline.kvcache.keys import KEY_BYTES, KeyScheme


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

    def cached_pages(self, token_ids: Sequence[int], salt: str, max_tokens: int) -> list[int]:
        """How many pages ``match`` would find in each part of the pool."""
        keys = list(self._keys(token_ids, salt, max_tokens))
        with self._lock:
            return [len(self._cached_run(_placed(keys, part))) for part in range(self._allocator.parts)]

    def match(self, token_ids: Sequence[int], salt: str, max_tokens: int, part: int = 0) -> tuple[list[PageRef], int]:
        """The longest run of whole pages from position 0 that is cached in a part of the pool, at most ``max_tokens``,
        and its tokens.

        The caller owns one reference to each page (``PageTable.adopt``). Pass ``len(prompt) - 1``: a forward
        needs at least one token. A page whose lookahead runs past ``token_ids`` cannot be looked up.
        """
        max_tokens = max(0, min(max_tokens, len(token_ids)))
        keys = self._keys(token_ids, salt, max_tokens)
        with self._lock:
            found = self._cached_run(_placed(keys, part))
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
        The cache takes its own reference to each new page. Where a key is cached already, in the same part of the pool,
        the first page stays.
        """
        num_pages = self.scheme.num_pages(len(token_ids), min(num_computed, num_computed + 1 - self.lookahead))
        if num_pages > len(pages):
            raise ValueError(f"{num_pages} whole pages are computed but {len(pages)} were given")
        part = self._allocator.part_of(pages[0]) if pages else 0
        keys = list(_placed(self.scheme.keys(token_ids, salt, num_pages), part))
        with self._lock:
            present = self._cached_run(iter(keys))
            self._touch(present)
            num_new = self._make_room(len(keys) - len(present), present[-1] if present else None)
            start, end = len(present), len(present) + num_new
            self._allocator.share(pages[start:end])
            for i in range(start, end):
                parent = keys[i - 1] if i else None
                self._entries[keys[i]] = _Entry(pages[i], parent)
                if parent is not None:
                    self._entries[parent].num_children += 1
            self._changes.stored(map(_key, keys[start:end]))
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
            pages = [entry.page for key, entry in self._entries.items() if _part(key) == part]
            return sum(1 for page in pages if self._allocator.refcount(page) == 1)

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
            last_first = list(dict.fromkeys(map(_key, reversed(self._entries))))
            return tuple(reversed(last_first[:max_keys]))

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
            if self._allocator.part_of(entry.page) != _part(key):
                problems.append(f"{entry.page} is not of part {_part(key)}")
            if entry.parent in seen:
                problems.append(f"{entry.page} would outlive its parent")
            if seen_children.get(key, 0) != entry.num_children:
                problems.append(f"{entry.page} counts {entry.num_children} children, not {seen_children.get(key, 0)}")
            if entry.parent is not None:
                seen_children[entry.parent] = seen_children.get(entry.parent, 0) + 1
            seen.add(key)
        return problems

    def _keys(self, token_ids: Sequence[int], salt: str, max_tokens: int) -> Iterator[bytes]:
        """The keys of pages that may be looked up."""
        num_pages = self.scheme.num_pages(len(token_ids), max(0, min(max_tokens, len(token_ids))))
        return self.scheme.keys(token_ids, salt, num_pages)

    def _cached_run(self, keys: Iterator[bytes]) -> list[bytes]:
        run: list[bytes] = []
        for key in keys:
            if key not in self._entries:
                break
            run.append(key)
        return run

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
            if part is not None and _part(key) != part:
                continue
            victims.append((key, entry))
            if entry.parent is not None:
                self._entries[entry.parent].num_children -= 1
        for key, _ in victims:
            del self._entries[key]
        gone = (key for key, _ in victims if not self._is_anywhere(_key(key)))
        self._changes.removed(map(_key, gone))
        self._allocator.release([entry.page for _, entry in victims])
        return len(victims)

    def _is_anywhere(self, key: bytes) -> bool:
        return any(place in self._entries for part in range(self._allocator.parts) for place in _placed([key], part))


def _placed(keys: Iterable[bytes], part: int) -> Iterator[bytes]:
    """What entries of a part are found by. Those of the first are found by their keys as they are."""
    return iter(keys) if part == 0 else (key + bytes((part,)) for key in keys)


def _key(place: bytes) -> bytes:
    return place[:KEY_BYTES]


def _part(place: bytes) -> int:
    return place[KEY_BYTES] if len(place) > KEY_BYTES else 0
