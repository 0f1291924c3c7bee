"""A pool of several parts: a sequence lives in one of them, with all of its pages.

Mutants that fail: pages freed into the first part; a full part evicts another one's pages; a run of cached pages goes
over two parts; a sequence without a cached prefix always goes to the first part; room that others read counts as room.
"""

from __future__ import annotations

import pytest
import torch

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.memory import KvMemory
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable

PAGE, PARTS, PAGES = 4, 2, 6  # pages of a part
PROMPT = list(range(3 * PAGE))


def memory() -> KvMemory:
    layout = KvLayout((KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 8),), torch.float32)
    allocator = PageAllocator(PARTS * PAGES, PARTS)
    prefix = PrefixCache(allocator, PAGE, 0, "parts", max_pages=9)
    return KvMemory(KvPool(layout, PARTS * PAGES, PAGE), allocator, prefix)


def held(made: KvMemory, pages: int) -> PageTable:
    """A table that lives where there is the most room."""
    table = made.table()
    table.ensure(pages * PAGE)
    return table


def end(made: KvMemory, table: PageTable, tokens: list[int]) -> None:
    assert made.prefix is not None
    made.prefix.insert(tokens, table.pages, len(tokens), "")
    table.release()


def whole(made: KvMemory) -> bool:
    assert made.prefix is not None
    return made.allocator.check_integrity(made.prefix.pages) == made.prefix.check_integrity() == []


def test_a_sequence_goes_where_there_is_room_and_grows_there() -> None:
    made = memory()
    tables = [held(made, pages) for pages in (3, 1, 3, 1)]
    assert [table.part for table in tables] == [0, 1, 1, 0]
    for table in tables:
        table.ensure(table.capacity + PAGE)
        assert {made.allocator.part_of(page) for page in table.pages} == {table.part}
    with pytest.raises(Overloaded, match="6 KV pages needed, 0 of 6"):
        tables[2].ensure(10 * PAGE)
    for table in tables:
        table.release()
    assert [made.allocator.free_in(part) for part in range(PARTS)] == [PAGES, PAGES]
    assert whole(made)


def test_cached_pages_are_room_but_for_those_that_somebody_reads() -> None:
    made = memory()
    assert made.prefix is not None
    end(made, held(made, 3), PROMPT)  # in part 0
    reader = made.table(pages := made.prefix.match(PROMPT, "", len(PROMPT))[0])
    reader.adopt(pages)
    assert [held(made, 1).part, held(made, 2).part] == [1, 1]  # 3 pages of part 0 are read
    reader.release()
    assert held(made, 1).part == 0


def test_a_cached_prefix_draws_to_its_part_or_is_left() -> None:
    made = memory()
    assert made.prefix is not None
    end(made, held(made, 3), PROMPT)  # in part 0
    filler = made.table(made.prefix.pages)
    filler.ensure(2 * PAGE)
    pages, tokens = made.prefix.match(PROMPT, "", len(PROMPT))
    table = made.table(pages)
    table.adopt(pages)
    assert (table.part, tokens) == (0, 12)
    with pytest.raises(Overloaded):
        table.ensure(5 * PAGE)
    assert made.elsewhere(table, 7 * PAGE) is None  # no part has as many
    other = made.elsewhere(table, 5 * PAGE)
    assert other is not None
    assert (other.part, other.capacity) == (1, 5 * PAGE)
    table.release()
    end(made, other, [*PROMPT, *range(100, 108)])  # behind the same prefix, which lies in part 0
    assert made.prefix.num_pages == 3
    end(made, held(made, 6), list(range(200, 224)))  # part 1 is cached now, and has room all the same
    assert made.prefix.num_pages == 9
    full = made.table(made.prefix.pages[-1:])
    full.ensure(6 * PAGE)
    assert made.prefix.num_pages == 3
    for left in (full, filler):
        left.release()
    assert whole(made)
