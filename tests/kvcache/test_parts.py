"""A pool of several parts: a sequence lives in one of them, with all of its pages.

Mutants that fail: pages freed into the first part; a full part evicts another one's pages; a page is found from another
part; a sequence always goes to the first part; pages that others read count as room; a prefix draws for ever; a key is
told as gone that another part has.
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
    reader = made.table((3, 0))
    reader.adopt(made.prefix.match(PROMPT, "", len(PROMPT), reader.part)[0])
    assert [held(made, 1).part, held(made, 2).part] == [1, 1]  # 3 pages of part 0 are read
    reader.release()
    assert held(made, 1).part == 0


def test_a_prefix_draws_until_another_part_is_emptier_by_its_pages() -> None:
    made = memory()
    assert made.prefix is not None
    end(made, held(made, 3), PROMPT)  # in part 0
    assert made.prefix.take_changes(False, 9).stored
    running, lived = [], []
    for _ in range(3):
        table = made.table(made.prefix.cached_pages(PROMPT, "", len(PROMPT)))
        table.adopt(made.prefix.match(PROMPT, "", len(PROMPT), table.part)[0])
        table.ensure(4 * PAGE)
        running.append(table)
        lived.append((table.part, made.prefix.hit_tokens))
    assert lived == [(0, 12), (1, 12), (0, 24)]
    for table in running:
        end(made, table, PROMPT)
    assert made.prefix.cached_pages(PROMPT, "", 99) == [3, 3]
    assert made.prefix.evict(9, 0) == 3
    assert made.prefix.take_changes(False, 9).removed == ()  # routers know the node by keys, and part 1 has them
    assert made.prefix.evict(9, 1) == 3
    assert len(made.prefix.take_changes(False, 9).removed) == 3
    assert whole(made)


def test_a_full_part_is_left_without_its_prefix() -> None:
    made = memory()
    assert made.prefix is not None
    end(made, held(made, 3), PROMPT)  # in part 0
    filler = made.table((9, 0))
    filler.ensure(2 * PAGE)
    table = made.table((9, 0))
    table.adopt(made.prefix.match(PROMPT, "", len(PROMPT))[0])
    with pytest.raises(Overloaded):
        table.ensure(5 * PAGE)
    assert made.elsewhere(table, 7 * PAGE) is None  # no part has as many
    other = made.elsewhere(table, 5 * PAGE)
    assert other is not None
    assert (other.part, other.capacity) == (1, 5 * PAGE)
    table.release()
    end(made, other, list(range(200, 220)))
    full = made.table((0, 9))
    full.ensure(6 * PAGE)  # takes what is cached in part 1, and nothing of part 0
    assert made.prefix.cached_pages(PROMPT, "", 99) == [3, 0]
    assert made.prefix.num_pages == 3
    for left in (full, filler):
        left.release()
    assert whole(made)
