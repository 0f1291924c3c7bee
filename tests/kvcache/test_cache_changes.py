"""What a prefix cache says of itself: changes that, applied in order, give what it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.changes import CacheChanges, ChangeLog
from paceline.kvcache.prefix import PrefixCache

PAGE = 2
STEP: st.SearchStrategy[tuple[str, list[int]]] = st.one_of(
    st.tuples(st.just("stored"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.just("removed"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.just("cleared"), st.just([])),
    st.tuples(st.just("take"), st.just([])),
)


def applied(held: set[bytes], changes: CacheChanges) -> set[bytes]:
    assert not set(changes.removed) & set(changes.stored)
    return ((set() if changes.cleared else held) - set(changes.removed)) | set(changes.stored)


@settings(deadline=None)
@given(steps=st.lists(STEP, max_size=30))
def test_changes_tell_the_whole_or_say_that_they_do_not(steps: list[tuple[str, list[int]]]) -> None:
    log, true, told = ChangeLog(max_changes=6), set[bytes](), set[bytes]()
    for step, numbers in [*steps, ("take", [])]:
        keys = [bytes([number]) for number in numbers]
        if step == "take":
            changes = log.take(lambda: tuple(sorted(true)), whole=False)
            assert (changes.keys is not None) == changes.lost
            told = set(changes.keys) if changes.keys is not None else applied(told, changes)
            assert told == true
        elif step == "stored":
            true.update(keys)
            log.stored(keys)
        elif step == "removed":
            true.difference_update(keys)
            log.removed(keys)
        else:
            true.clear()
            log.cleared()


def test_more_changes_than_are_kept_are_lost_until_all_is_cleared() -> None:
    log = ChangeLog(max_changes=2)
    log.stored([b"1", b"2", b"3"])
    log.stored([b"4"])
    assert log.take(lambda: (b"all",), whole=False) == CacheChanges(keys=(b"all",), lost=True)
    log.stored([b"1", b"2", b"3"])
    log.cleared()
    log.stored([b"5"])
    assert log.take(lambda: (b"all",), whole=False) == CacheChanges(cleared=True, stored=(b"5",))


def test_the_cache_tells_what_enters_what_is_evicted_and_what_is_cleared() -> None:
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, PAGE, 0, "model", max_pages=3)

    def add(*token_ids: int) -> None:
        pages = allocator.allocate(len(token_ids) // PAGE)
        cache.insert(token_ids, pages, len(token_ids), "")
        allocator.release(pages)

    def key(*token_ids: int) -> bytes:
        return list(cache.scheme.keys(token_ids, "", len(token_ids) // PAGE))[-1]

    add(1, 2, 3, 4)
    assert cache.take_changes(False, 9) == CacheChanges(stored=(key(1, 2), key(1, 2, 3, 4)))
    assert cache.take_changes(False, 9) == CacheChanges()
    add(5, 6, 7, 8)  # the cache was full: the leaf of the first sequence gives way
    assert cache.take_changes(False, 9) == CacheChanges(removed=(key(1, 2, 3, 4),), stored=(key(5, 6), key(5, 6, 7, 8)))
    assert set(cache.take_changes(True, 9).keys or ()) == {key(1, 2), key(5, 6), key(5, 6, 7, 8)}
    assert cache.take_changes(True, 1).keys == (key(5, 6),)  # of those used last; a page never without its parents
    cache.clear()
    assert cache.take_changes(False, 9) == CacheChanges(cleared=True)


def test_a_lookup_changes_nothing() -> None:
    """tokenspeed #166: every lookup told that the cache was cleared."""
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, PAGE, 0, "model")
    pages = allocator.allocate(2)
    cache.insert((1, 2, 3, 4), pages, 4, "")
    cache.take_changes(False, 9)
    allocator.release(cache.match((1, 2, 3, 4), "", 4)[0])
    allocator.release(cache.match((1, 2, 9, 9), "", 4)[0])
    assert cache.insert((1, 2, 3, 4), pages, 4, "") == 0
    assert cache.take_changes(False, 9) == CacheChanges()
