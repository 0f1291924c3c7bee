"""PrefixCache: what may match, what may enter, what goes first."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.kvcache.allocator import PageAllocator, PageRef
from paceline.kvcache.prefix import PrefixCache

PAGE = 4
A = list(range(100, 108))  # two pages


def make(lookahead: int = 0, num_pages: int = 16, max_pages: int | None = None) -> tuple[PageAllocator, PrefixCache]:
    allocator = PageAllocator(num_pages)
    return allocator, PrefixCache(allocator, PAGE, lookahead, "model", max_pages)


def add(allocator: PageAllocator, cache: PrefixCache, token_ids: Sequence[int], salt: str = "") -> list[PageRef]:
    """A finished sequence: all its rows exact, its pages given back. Returns the pages it computed."""
    pages = allocator.allocate(-(-len(token_ids) // PAGE))
    cache.insert(token_ids, pages, len(token_ids), salt)
    allocator.release(pages)
    return pages


def matched(allocator: PageAllocator, cache: PrefixCache, token_ids: Sequence[int], salt: str = "") -> int:
    """Tokens found, the references given back."""
    pages, num_tokens = cache.match(token_ids, salt, len(token_ids))
    assert num_tokens == len(pages) * PAGE
    allocator.release(pages)
    return num_tokens


def assert_whole(allocator: PageAllocator, cache: PrefixCache, owned: Sequence[PageRef] = ()) -> None:
    assert cache.check_integrity() == []
    assert allocator.check_integrity([*cache.pages, *owned]) == []


def test_match_shares_the_pages_that_were_entered() -> None:
    allocator, cache = make()
    entered = add(allocator, cache, A)
    pages, num_tokens = cache.match([*A, 1, 2], "", 9)
    assert (pages, num_tokens) == (entered, 8)
    assert [allocator.refcount(ref) for ref in pages] == [2, 2]
    assert_whole(allocator, cache, pages)
    assert cache.match([7, *A], "", 9) == ([], 0)
    assert (cache.hit_tokens, cache.queried_tokens) == (8, 18)


@pytest.mark.parametrize(("max_tokens", "found"), [(8, 8), (7, 4), (4, 4), (3, 0), (0, 0), (-1, 0), (99, 8)])
def test_match_keeps_to_max_tokens(max_tokens: int, found: int) -> None:
    allocator, cache = make()
    add(allocator, cache, A)
    pages, num_tokens = cache.match(A, "", max_tokens)
    assert num_tokens == found
    assert_whole(allocator, cache, pages)


@pytest.mark.parametrize("lookahead", [0, 1, 3, 6])
def test_match_needs_the_lookahead_in_the_prompt(lookahead: int) -> None:
    """Page i needs (i+1)*page_size + lookahead <= len(token_ids); one token fewer and it cannot be keyed."""
    allocator, cache = make(lookahead)
    long = [*A, *range(50, 60)]
    add(allocator, cache, long)
    for num_pages in (1, 2):
        enough = num_pages * PAGE + lookahead
        assert matched(allocator, cache, long[:enough]) == num_pages * PAGE
        assert matched(allocator, cache, long[: enough - 1]) == (num_pages - 1) * PAGE


def test_a_page_is_told_by_the_token_after_it() -> None:
    """algorithms.md E7: the last draft row of a page depends on the next token, so another next token is a miss."""
    allocator, cache = make(lookahead=1)
    add(allocator, cache, [*A, 7])
    assert matched(allocator, cache, [*A, 7]) == 8
    assert matched(allocator, cache, [*A, 8]) == 4  # page 0 is followed by the same token in both
    add(allocator, cache, [*A, 8])
    assert cache.num_pages == 3  # page 1 twice, once for each next token; page 0 shared
    assert matched(allocator, cache, [*A, 8]) == 8
    assert_whole(allocator, cache)


def draft_rows(token_ids: Sequence[int], modules: int) -> list[tuple[int, ...]]:
    """The tokens that determine each draft row: t_0..t_{i+modules} for row i of the last module."""
    return [tuple(token_ids[: i + modules + 1]) for i in range(len(token_ids) - modules)]


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_without_lookahead_the_wrong_page_would_match(modules: int) -> None:
    """Two sequences that part right after a page (or within the chained modules' reach): their draft rows differ."""
    first, second = [*A, 1, 1, 1], [*A, *[1] * (modules - 1), 2, 2, 2]
    for lookahead, exact in ((modules, True), (modules - 1, False)):
        allocator, cache = make(lookahead)
        add(allocator, cache, first)
        found = matched(allocator, cache, second)
        rows_match = draft_rows(first, modules)[:found] == draft_rows(second, modules)[:found]
        assert found == (4 if exact else 8)
        assert rows_match is exact


def test_ancestors_do_not_carry_their_lookahead_twice() -> None:
    """Page 1 continues one chain: it is found through page 0 whatever was looked up in between."""
    allocator, cache = make(lookahead=2)
    pages = allocator.allocate(3)
    tokens = [*A, 1, 2, 3, 4, 5, 6]
    assert cache.insert(tokens[:6], pages[:1], 6, "") == 1  # page 0 by a short sequence
    assert cache.insert(tokens, pages, 14, "") == 2  # the rest by a longer one
    assert cache.match(tokens, "", 14) == (pages, 12)
    assert cache.check_integrity() == []


def test_salt_and_namespace_isolate() -> None:
    allocator = PageAllocator(16)
    cache = PrefixCache(allocator, PAGE, 0, "model")
    add(allocator, cache, A, salt="tenant a")
    assert matched(allocator, cache, A, salt="tenant b") == 0
    assert matched(allocator, cache, A) == 0
    assert matched(allocator, cache, A, salt="tenant a") == 8
    keys = {
        next(PrefixCache(allocator, PAGE, 0, namespace).scheme.keys(A, salt, 1))
        for namespace, salt in (("model", "x"), ("other", "x"), ("model", "y"), ("modelx", ""), ("", "modelx"))
    }
    assert len(keys) == 5  # also where namespace and salt join to the same text


@pytest.mark.parametrize(
    ("lookahead", "num_computed", "num_tokens", "entered"),
    [
        # Without draft rows: a page whose last row is computed.
        (0, 8, 8, 2),
        (0, 7, 8, 1),
        (0, 8, 9, 2),
        # One module: row e-1 is exact at num_computed = e, once t_e is known.
        (1, 8, 9, 2),
        (1, 7, 9, 1),
        (1, 8, 8, 1),
        # Module 2 is exact on rows <= m-2: rows 0..7 need m = 9.
        (2, 9, 10, 2),
        (2, 8, 10, 1),
        (2, 8, 9, 1),
        (2, 9, 9, 1),
        # Module 3 is exact on rows <= m-3.
        (3, 10, 11, 2),
        (3, 9, 11, 1),
        (3, 5, 99, 0),
        (3, 6, 99, 1),
        (1, 0, 1, 0),
    ],
)
def test_insertion_rule_at_the_boundary(lookahead: int, num_computed: int, num_tokens: int, entered: int) -> None:
    allocator, cache = make(lookahead)
    pages = allocator.allocate(3)
    tokens = list(range(num_tokens))
    assert cache.insert(tokens, pages, num_computed, "") == entered
    assert cache.pages == pages[:entered][::-1]
    assert_whole(allocator, cache, pages)


def test_insert_wants_the_pages_it_may_enter() -> None:
    allocator, cache = make()
    with pytest.raises(ValueError, match="2 whole pages are computed but 1 were given"):
        cache.insert(A, allocator.allocate(1), 8, "")


def test_the_first_page_of_a_key_stays() -> None:
    allocator, cache = make()
    first = add(allocator, cache, A)
    twin = allocator.allocate(3)
    assert cache.insert([*A, 1, 2, 3, 4], twin, 12, "") == 1
    assert cache.match([*A, 1, 2, 3, 4], "", 12)[0] == [*first, twin[2]]
    assert [allocator.refcount(ref) for ref in twin] == [1, 1, 3]


def test_eviction_takes_the_least_recently_used_first() -> None:
    allocator, cache = make()
    x, y, z = [1] * PAGE, [2] * PAGE, [3] * PAGE
    for tokens in (x, y, z):
        add(allocator, cache, tokens)
    matched(allocator, cache, x)
    assert cache.evict(1) == 1
    assert [matched(allocator, cache, tokens) for tokens in (x, y, z)] == [4, 0, 4]
    assert cache.evict(9) == 2
    assert cache.evict(1) == 0
    assert allocator.num_free == 16


def test_eviction_takes_leaves_before_parents() -> None:
    allocator, cache = make()
    chain, branch = list(range(16)), [*range(8), 7, 7, 7, 7]
    stem = add(allocator, cache, chain)
    (twig,) = add(allocator, cache, branch)[2:]
    matched(allocator, cache, chain[:4])  # the root is used last
    order = [stem[3], stem[2], twig, stem[1], stem[0]]  # the older branch from its end, then the other, then the stem
    while order:
        assert set(cache.pages) == set(order)
        assert_whole(allocator, cache)
        assert cache.evict(1) == 1
        order.pop(0)
    assert cache.num_pages == 0


def test_one_call_evicts_a_whole_branch() -> None:
    allocator, cache = make()
    add(allocator, cache, list(range(16)))
    add(allocator, cache, [9] * PAGE)
    assert cache.evict(4) == 4
    assert matched(allocator, cache, [9] * PAGE) == 4
    assert_whole(allocator, cache)


def test_eviction_leaves_pages_in_use() -> None:
    allocator, cache = make()
    chain = list(range(12))
    add(allocator, cache, chain)
    pages, _ = cache.match(chain, "", 8)
    assert cache.evict(9) == 1  # the page past the match
    assert_whole(allocator, cache, pages)
    allocator.release(pages)
    assert cache.evict(9) == 2


def test_a_parent_stays_while_its_child_is_in_use() -> None:
    """No one holds the cached page 0, since the sequence that entered page 1 computed its own copy of page 0."""
    allocator, cache = make()
    add(allocator, cache, A[:4])
    twin = allocator.allocate(2)
    cache.insert(A, twin, 8, "")
    assert cache.evict(9) == 0
    assert_whole(allocator, cache, twin)
    allocator.release(twin)
    assert cache.evict(9) == 2


def test_the_cache_is_bounded_by_evicting_on_insert() -> None:
    allocator, cache = make(num_pages=16, max_pages=3)
    add(allocator, cache, [1] * PAGE)
    add(allocator, cache, A)
    assert cache.num_pages == 3
    add(allocator, cache, [2] * PAGE)
    assert matched(allocator, cache, [1] * PAGE) == 0
    assert cache.num_pages == 3
    add(allocator, cache, list(range(20)))  # five pages: the first three enter
    assert matched(allocator, cache, list(range(20))) == 12
    assert_whole(allocator, cache)
    assert allocator.num_free == 13


def test_insert_never_evicts_the_parent_of_what_it_enters() -> None:
    """The cached page 0 is a leaf that no one holds: the sequence computed its own copy."""
    allocator, cache = make(max_pages=1)
    add(allocator, cache, A[:4])
    pages = allocator.allocate(2)
    assert cache.insert(A, pages, 8, "") == 0
    assert matched(allocator, cache, A) == 4
    assert_whole(allocator, cache, pages)


def test_insert_enters_nothing_when_every_cached_page_is_in_use() -> None:
    allocator, cache = make(max_pages=2)
    add(allocator, cache, A)
    held, _ = cache.match(A, "", 8)
    add(allocator, cache, [9] * PAGE)
    assert matched(allocator, cache, [9] * PAGE) == 0
    assert_whole(allocator, cache, held)


def test_half_of_the_pool_by_default_and_none_when_told() -> None:
    assert make(num_pages=16)[1].max_pages == 8
    allocator, cache = make(max_pages=0)
    add(allocator, cache, A)
    assert cache.num_pages == 0
    assert allocator.num_free == 16


def test_clear_gives_back_what_no_one_holds() -> None:
    allocator, cache = make()
    add(allocator, cache, A)
    held, _ = cache.match(A, "", 4)
    cache.clear()
    assert cache.num_pages == 0
    assert allocator.num_free == 15
    assert matched(allocator, cache, A) == 0
    assert_whole(allocator, cache, held)


def test_integrity_reports_damage() -> None:
    allocator, cache = make()
    add(allocator, cache, A)
    child, parent = list(cache._entries)
    cache._entries.move_to_end(child)
    assert any("outlive its parent" in problem for problem in cache.check_integrity())
    cache._entries.move_to_end(parent)
    cache._entries[parent].num_children = 2
    assert any("counts 2 children" in problem for problem in cache.check_integrity())
    del cache._entries[parent]
    assert any("lost its parent" in problem for problem in cache.check_integrity())
    allocator.release([cache._entries[child].page])
    assert any("is stale" in problem for problem in cache.check_integrity())


def test_bad_numbers_are_refused() -> None:
    for page_size, lookahead, max_pages in ((0, 0, 1), (4, -1, 1), (4, 0, -1)):
        with pytest.raises(ValueError, match="bad page_size"):
            PrefixCache(PageAllocator(4), page_size, lookahead, "", max_pages)
