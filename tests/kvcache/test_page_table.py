"""PageTable: position to slot, growth, adoption, release."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator, StalePage
from paceline.kvcache.table import PageTable

torch.set_num_threads(1)


def expected_slots(table: PageTable) -> list[int]:
    return [
        table.pages[i // table.page_size].page * table.page_size + i % table.page_size for i in range(table.capacity)
    ]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots_follow_pages_while_the_table_grows(page_size: int) -> None:
    allocator = PageAllocator(40)
    table = PageTable(allocator, page_size)
    assert table.slots.tolist() == []
    other = allocator.allocate(3)
    for num_tokens in (1, page_size, page_size + 1, 5 * page_size, 5 * page_size, 9 * page_size):
        table.ensure(num_tokens)
        assert table.capacity == -(-num_tokens // page_size) * page_size
        assert table.slots.dtype == torch.int32
        assert table.slots.tolist() == expected_slots(table)
        other += allocator.allocate(1)  # so that the next page is not the neighbour
    assert len(table.pages) == 9
    assert allocator.check_integrity([*table.pages, *other]) == []


def test_ensure_is_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    table = PageTable(allocator, 8)
    table.ensure(17)
    before = list(table.pages)
    with pytest.raises(Overloaded):
        table.ensure(41)
    assert table.pages == before
    assert allocator.num_free == 1
    table.ensure(32)
    assert table.capacity == 32


def test_ensure_takes_pages_from_the_cache_when_the_pool_is_empty() -> None:
    allocator = PageAllocator(4)
    cached = allocator.allocate(3)
    asked: list[int] = []

    def evict(n: int) -> int:
        asked.append(n)
        given = [cached.pop() for _ in range(min(n, len(cached)))]
        allocator.release(given)
        return len(given)

    table = PageTable(allocator, 2, evict=evict)
    table.ensure(2)
    assert asked == []
    table.ensure(6)
    assert asked == [2]
    assert allocator.check_integrity([*table.pages, *cached]) == []
    with pytest.raises(Overloaded):
        table.ensure(10)
    assert len(table.pages) == 3


def test_adopted_pages_come_first_and_must_be_current() -> None:
    allocator = PageAllocator(5)
    shared = allocator.allocate(2)
    allocator.share(shared)
    table = PageTable(allocator, 4)
    table.adopt(shared)
    table.ensure(9)
    assert table.pages[:2] == shared
    assert table.slots.tolist() == expected_slots(table)
    with pytest.raises(ValueError, match="has 3 pages"):
        table.adopt(shared)
    table.release()
    assert [allocator.refcount(ref) for ref in shared] == [1, 1]
    allocator.release(shared)
    with pytest.raises(StalePage):
        table.adopt(shared)
    assert table.capacity == 0


def test_release_is_idempotent_and_the_table_can_be_filled_again() -> None:
    allocator = PageAllocator(3)
    table = PageTable(allocator, 4)
    table.ensure(12)
    table.release()
    table.release()
    assert allocator.num_free == 3
    assert (table.capacity, table.slots.tolist()) == (0, [])
    table.ensure(5)
    assert table.slots.tolist() == expected_slots(table)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size"):
        PageTable(PageAllocator(1), 0)
    with pytest.raises(ValueError, match="-1"):
        PageTable(PageAllocator(1), 4).ensure(-1)
