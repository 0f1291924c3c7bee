"""Allocator, tables and prefix cache together, driven at random against a model that knows what each row holds.

The model writes into every slot the tokens that its row depends on: row i is exact when it holds the salt and
t_0..t_{i+lookahead}. A row whose lookahead tokens are not committed yet holds a draft's. Hence: a hit must yield
rows that are exact for the sequence that hits, and no one may write a page that another reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator, PageRef
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable

torch.set_num_threads(1)

NUM_PAGES, MAX_CACHED, MAX_TOKENS = 14, 7, 24
TOKENS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=8)  # skewed: common prefixes
CHUNK = st.integers(1, 8)
SALTS = st.sampled_from(["", "tenant"])

Row = tuple[str, tuple[int, ...]]  # salt, tokens that the row depends on
DRAFT: Row = ("draft", ())
Key = tuple[str, tuple[int, ...], int]  # salt, tokens up to the lookahead's end, page end


@dataclass(eq=False)
class Sequence:
    """A sequence and what the model knows of it."""

    tokens: list[int]
    salt: str
    table: PageTable
    num_computed: int = 0
    num_exact: int = 0  # leading rows of which every module's part is exact


class KvCacheMachine(RuleBasedStateMachine):
    """Random lives of sequences over one small pool."""

    sequences: Any = Bundle("sequences")

    @initialize(page_size=st.sampled_from([1, 2, 4]), lookahead=st.integers(0, 3))
    def build(self, page_size: int, lookahead: int) -> None:
        self.page_size, self.lookahead = page_size, lookahead
        self.allocator = PageAllocator(NUM_PAGES)
        self.cache = PrefixCache(self.allocator, page_size, lookahead, "model", MAX_CACHED)
        self.live: list[Sequence] = []
        self.rows: dict[int, Row] = {}  # slot -> what was written there last
        self.known: dict[Key, PageRef] = {}  # what the cache should hold

    @rule(target=sequences, tokens=TOKENS, salt=SALTS, chunk=CHUNK)
    def start(self, tokens: list[int], salt: str, chunk: int) -> Any:
        sequence = Sequence(tokens, salt, PageTable(self.allocator, self.page_size, self.cache.evict))
        pages, num_cached = self.cache.match(tokens, salt, len(tokens) - 1)
        assert pages == self.expected_match(tokens, salt)
        assert num_cached == len(pages) * self.page_size < len(tokens)
        sequence.table.adopt(pages)
        sequence.num_computed = sequence.num_exact = num_cached
        for position in range(num_cached):
            assert self.rows[int(sequence.table.slots[position])] == self.exact_row(sequence, position)
        self.live.append(sequence)
        return sequence if self.compute(sequence, min(len(tokens), num_cached + chunk)) else multiple()

    @rule(sequence=sequences, chunk=CHUNK)
    def prefill_further(self, sequence: Sequence, chunk: int) -> None:
        if sequence in self.live:
            self.compute(sequence, min(len(sequence.tokens), sequence.num_computed + chunk))

    @rule(sequence=sequences, accepted=TOKENS, num_rejected=st.integers(0, 6))
    def decode(self, sequence: Sequence, accepted: list[int], num_rejected: int) -> None:
        """A round: slots for the tree, some of it accepted."""
        if sequence not in self.live or len(sequence.tokens) + len(accepted) > MAX_TOKENS:
            return
        if sequence.num_computed < len(sequence.tokens) - 1:
            return  # still in prefill
        sequence.tokens += accepted
        self.compute(sequence, len(sequence.tokens) - 1, num_rejected)

    @rule(sequence=sequences)
    def enter(self, sequence: Sequence) -> None:
        if sequence in self.live:
            self.insert(sequence)

    @rule(sequence=consumes(sequences), enter=st.booleans())
    def finish(self, sequence: Sequence, enter: bool) -> None:
        if sequence not in self.live:
            return
        if enter:
            self.insert(sequence)
        self.drop(sequence)

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        free, cached = self.allocator.num_free, self.cache.num_pages
        evicted = self.cache.evict(n)
        assert self.allocator.num_free == free + evicted
        assert self.cache.num_pages == cached - evicted
        self.forget_evicted()
        if evicted < n:
            assert not any(self.evictable(key) for key in self.known)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.known.clear()

    @invariant()
    def whole(self) -> None:
        owned = [ref for sequence in self.live for ref in sequence.table.pages]
        assert self.allocator.check_integrity([*owned, *self.cache.pages]) == []
        assert self.cache.check_integrity() == []
        in_use = Counter(ref.page for ref in [*owned, *self.cache.pages])
        assert self.allocator.num_free == NUM_PAGES - len(in_use)
        assert set(self.known.values()) == set(self.cache.pages)

    def compute(self, sequence: Sequence, num_computed: int, num_spare: int = 0) -> bool:
        """Write the rows of a forward and of the drafter's extend; on overload the sequence is preempted."""
        try:
            sequence.table.ensure(num_computed + num_spare)
        except Overloaded:
            self.forget_evicted()
            self.drop(sequence)
            return False
        self.forget_evicted()
        exact = max(sequence.num_exact, self.exact_limit(sequence, num_computed))
        for position in range(sequence.num_exact, num_computed + num_spare):
            page = sequence.table.pages[position // self.page_size]
            assert self.allocator.refcount(page) == 1, "a page that another reads was written"
            slot = int(sequence.table.slots[position])
            self.rows[slot] = self.exact_row(sequence, position) if position < exact else DRAFT
        sequence.num_computed, sequence.num_exact = num_computed, exact
        return True

    def insert(self, sequence: Sequence) -> None:
        before = set(self.cache.pages)
        entered = self.cache.insert(sequence.tokens, sequence.table.pages, sequence.num_computed, sequence.salt)
        self.forget_evicted()
        new = [ref for ref in sequence.table.pages if ref in set(self.cache.pages) - before]
        assert len(new) == entered
        for index, ref in enumerate(sequence.table.pages):
            if ref in new:
                self.known[self.key(sequence.tokens, sequence.salt, index)] = ref
                for position in range(index * self.page_size, (index + 1) * self.page_size):
                    slot = ref.page * self.page_size + position % self.page_size
                    assert self.rows[slot] == self.exact_row(sequence, position)
        if self.cache.num_pages < MAX_CACHED:  # nothing was left out for lack of room
            whole = max(0, self.exact_limit(sequence, sequence.num_computed)) // self.page_size
            assert all(self.key(sequence.tokens, sequence.salt, i) in self.known for i in range(whole))

    def drop(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        sequence.table.release()

    def key(self, tokens: list[int], salt: str, index: int) -> Key:
        end = (index + 1) * self.page_size
        return salt, tuple(tokens[: end + self.lookahead]), end

    def expected_match(self, tokens: list[int], salt: str) -> list[PageRef]:
        pages: list[PageRef] = []
        while (end := (len(pages) + 1) * self.page_size) < len(tokens) and end + self.lookahead <= len(tokens):
            ref = self.known.get(self.key(tokens, salt, len(pages)))
            if ref is None:
                break
            pages.append(ref)
        return pages

    def exact_limit(self, sequence: Sequence, num_computed: int) -> int:
        """Leading rows that are exact in the target and in each of ``lookahead`` chained modules: module k reads
        k tokens ahead and drafts reach its rows past num_computed - k (algorithms.md E9)."""
        modules = range(1, self.lookahead + 1)
        limits = [min(len(sequence.tokens) - k, num_computed - k + 1) for k in modules]
        return min([num_computed, *limits])

    def exact_row(self, sequence: Sequence, position: int) -> Row:
        needed = position + 1 + self.lookahead
        assert needed <= len(sequence.tokens)
        return sequence.salt, tuple(sequence.tokens[:needed])

    def evictable(self, key: Key) -> bool:
        salt, tokens, end = key
        children = [
            other
            for other in self.known
            if other[0] == salt and other[2] == end + self.page_size and other[1][: len(tokens)] == tokens
        ]
        return not children and self.allocator.refcount(self.known[key]) == 1

    def forget_evicted(self) -> None:
        cached = set(self.cache.pages)
        self.known = {key: ref for key, ref in self.known.items() if ref in cached}


TestKvCacheModel = KvCacheMachine.TestCase
TestKvCacheModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
