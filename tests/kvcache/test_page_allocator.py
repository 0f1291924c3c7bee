"""PageAllocator: references and generations."""

from __future__ import annotations

import threading

import pytest

from paceline.errors import Overloaded
from paceline.kvcache.allocator import PageAllocator, PageRef, StalePage


def test_allocation_is_all_or_nothing() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(3)
    assert len({ref.page for ref in pages}) == 3
    with pytest.raises(Overloaded, match="2 KV pages needed, 1 of 4 free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    assert allocator.allocate(0) == []
    assert allocator.check_integrity(pages) == []


def test_a_page_is_free_when_its_last_owner_leaves() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.share(pages)
    allocator.release(pages)
    assert allocator.num_free == 1
    assert allocator.refcount(pages[0]) == 1
    allocator.release(pages)
    assert allocator.num_free == 2


def test_a_stale_generation_is_refused() -> None:
    """vllm #52232: a reference from an earlier life of a page answers nobody's request."""
    allocator = PageAllocator(1)
    (old,) = allocator.allocate(1)
    allocator.release([old])
    for call in (allocator.check, allocator.refcount):
        with pytest.raises(StalePage):
            call(old)  # free now
    (new,) = allocator.allocate(1)
    assert new == PageRef(old.page, old.generation + 1)
    for use in (allocator.share, allocator.release):
        with pytest.raises(StalePage):
            use([old])  # someone else's now
    allocator.check(new)
    assert allocator.refcount(new) == 1


@pytest.mark.parametrize("ref", [PageRef(0, 0), PageRef(9, 0), PageRef(-1, 0)])
def test_a_reference_never_handed_out_is_refused(ref: PageRef) -> None:
    with pytest.raises(StalePage):
        PageAllocator(2).check(ref)


def test_double_release_is_refused_and_changes_nothing() -> None:
    allocator = PageAllocator(3)
    a, b = allocator.allocate(2)
    with pytest.raises(StalePage, match="2 references given back, 1 held"):
        allocator.release([b, a, a])
    assert allocator.refcount(a) == allocator.refcount(b) == 1
    allocator.release([a])
    with pytest.raises(StalePage):
        allocator.release([a])
    assert allocator.check_integrity([b]) == []


def test_integrity_reports_lost_and_doubly_owned_pages() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    assert allocator.check_integrity([page, page]) == ["page 0 has 2 owners and 1 references"]
    assert allocator.check_integrity([]) == ["page 0 has 0 owners and 1 references"]
    assert "stale" in allocator.check_integrity([page, PageRef(1, 7)])[0]
    allocator._refcount[page.page] = 0
    assert allocator.check_integrity() == ["page 0 is lost: neither free nor referenced"]
    allocator._free[0] += [1, 1]
    assert "page 1 is 3 times in the free list" in allocator.check_integrity()
    allocator._refcount[1] = 1
    assert "page 1 is free with 1 references" in allocator.check_integrity()


def test_threads_never_get_the_same_page() -> None:
    allocator = PageAllocator(16)
    owners = [0] * 16
    clashes: list[int] = []

    def work() -> None:
        for _ in range(300):
            try:
                pages = allocator.allocate(5)
            except Overloaded:
                continue
            for ref in pages:
                owners[ref.page] += 1
                if owners[ref.page] != 1:
                    clashes.append(ref.page)
            for ref in pages:
                owners[ref.page] -= 1
            allocator.release(pages)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert clashes == []
    assert allocator.num_free == 16
    assert allocator.check_integrity([]) == []


def test_empty_pools_and_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="-1"):
        PageAllocator(1).allocate(-1)
