"""What drafters keep of finished outputs: by tenant, bounded, oldest out first."""

from __future__ import annotations

import random

import pytest
import torch

from paceline.spec_decode.drafters.copying import BOUNDARY, text_of
from paceline.spec_decode.drafters.tenants import FinishedTexts, TenantCache, TenantOutputs
from tests.support.drafting import new_sequence

torch.set_num_threads(1)


def test_texts_leave_whole_and_oldest_first() -> None:
    texts = FinishedTexts(max_tokens=40)
    rng = random.Random(2)
    stored: list[list[int]] = []
    for _ in range(300):
        stored.append([rng.randrange(6) for _ in range(rng.randrange(2, 20))])
        texts.add(stored[-1])
        kept = next(
            n for n in range(len(stored), 0, -1) if sum(len(tokens) + 1 for tokens in stored[-n:]) <= 40
        )  # as many of the newest as fit
        assert texts.text == "".join(text_of(tokens) + BOUNDARY for tokens in stored[-kept:])
    texts.add(list(range(100)))
    assert texts.text == text_of(range(61, 100)) + BOUNDARY  # of a longer text its end


def test_the_least_recently_used_tenant_goes_first() -> None:
    cache: TenantCache[list[int]] = TenantCache(list, max_tenants=2)
    cache.get("a").append(1)
    cache.get("b").append(2)
    assert cache.find("a") == [1]  # a use
    assert cache.find("c") is None  # asking makes none
    cache.get("c")
    assert (cache.find("a"), cache.find("b"), len(cache)) == ([1], None, 2)
    with pytest.raises(ValueError, match="must be"):
        TenantCache(list, max_tenants=0)


def test_an_output_is_learnt_once_per_drafter_and_its_tenant_alone_sees_it() -> None:
    one, other = TenantOutputs("one", 100, 4), TenantOutputs("other", 100, 4)
    seq = new_sequence([3, 4], [5, 6, 7], salt="a")
    for outputs in (one, one, other):
        outputs.learn(seq)
    assert one.text(seq) == other.text(seq) == text_of([5, 6, 7]) + BOUNDARY  # the prompt is not learnt
    assert one.text(new_sequence([3], salt="b")) == one.text(new_sequence([3])) == ""
    assert len(one.tenants) == 1
    for short in ([], [5]):
        one.learn(new_sequence([3], short, salt="b"))
    assert len(one.tenants) == 1
    nothing = TenantOutputs("one", 0, 4)
    nothing.learn(new_sequence([3], [5, 6, 7]))
    assert len(nothing.tenants) == 0
    with pytest.raises(ValueError, match="must be"):
        TenantOutputs("one", -1, 4)
