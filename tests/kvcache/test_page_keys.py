"""The one definition of a page's key: what a router computes is what a node's prefix cache has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.keys import KEY_BYTES, KEY_VERSION, KeyScheme
from paceline.kvcache.prefix import PrefixCache

SCHEME = KeyScheme(4, 1, "model/weights/drafter")
TOKENS = tuple(range(50, 63))
GOLDEN = "affe4e7bbf2d29792a11633ab081dac3"  # of page 2 of TOKENS, tenant "a"


def keys(scheme: KeyScheme, token_ids: tuple[int, ...] = TOKENS, salt: str = "") -> list[bytes]:
    return list(scheme.keys(token_ids, salt, scheme.num_pages(len(token_ids), len(token_ids))))


@settings(deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple),
    page_size=st.integers(1, 8),
    lookahead=st.integers(0, 4),
    salt=st.text(max_size=4),
    namespace=st.text(max_size=4),
)
def test_a_routers_keys_are_those_of_the_cache(
    token_ids: tuple[int, ...], page_size: int, lookahead: int, salt: str, namespace: str
) -> None:
    allocator = PageAllocator(64)
    cache = PrefixCache(allocator, page_size, lookahead, namespace, max_pages=64)
    pages = allocator.allocate(-(-len(token_ids) // page_size)) if token_ids else []
    cache.insert(token_ids, pages, len(token_ids) + lookahead, salt)
    router = KeyScheme.from_json(cache.scheme.to_json())
    found = keys(router, token_ids, salt)
    assert set(cache.take_changes(True, 64).keys or ()) == set(found)
    matched, num_tokens = cache.match(token_ids, salt, len(token_ids))
    assert num_tokens == len(found) * page_size
    allocator.release([*matched, *pages])


def test_everything_that_rows_depend_on_is_in_the_key() -> None:
    """sglang #24568: keys published without the cache salt were the same for two tenants."""
    first = {keys(SCHEME)[0]}
    first.add(keys(SCHEME, salt="tenant")[0])
    first.add(keys(replace(SCHEME, namespace="model/weights/other"))[0])
    first.add(keys(SCHEME, (*TOKENS[:4], 7, *TOKENS[5:]))[0])  # only the lookahead token differs
    first.add(keys(SCHEME, (7, *TOKENS[1:]))[0])
    assert len(first) == 5
    assert all(len(key) == KEY_BYTES for key in first)


def test_keys_are_the_same_in_every_process() -> None:
    """vllm-router #294: with Python's own hashing, router and node agree by luck. A change of what is computed must
    change KEY_VERSION too."""
    code = "from paceline.kvcache.keys import KeyScheme; import sys; assert 'torch' not in sys.modules; "
    code += f"print(list(KeyScheme(4, 1, {SCHEME.namespace!r}).keys({TOKENS}, 'a', 3))[2].hex())"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == GOLDEN
    assert KEY_VERSION == 1


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "pages"), [(13, 12, 3), (12, 12, 2), (13, 11, 2), (4, 3, 0), (1, 0, 0), (0, -1, 0)]
)
def test_pages_that_have_a_key(num_tokens: int, max_tokens: int, pages: int) -> None:
    assert SCHEME.num_pages(num_tokens, max_tokens) == pages


@pytest.mark.parametrize(
    "body",
    [
        replace(SCHEME, version=KEY_VERSION + 1).to_json(),
        '{"page_size": 4}',
        '{"page_size": 0, "lookahead": 0, "namespace": ""}',
        "[]",
        "4",
        "not JSON",
        SCHEME.to_json()[:-1] + ', "hash": "sha256"}',
    ],
)
def test_a_scheme_that_cannot_be_computed_is_refused(body: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json has its own message)
        KeyScheme.from_json(body)
