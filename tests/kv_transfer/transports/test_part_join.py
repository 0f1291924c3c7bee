"""The join of a hand-off's parts: ready together or not at all, and over only when no part is under way."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch

from kv_transfer.layout.parts import PartJoin, part_ticket
from kv_transfer.layout.reshard import Side, reshard
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner

LAYOUT = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, 8, 2),), torch.bfloat16)


class Watched:
    """A join, and what it told."""

    def __init__(self, parts: str = "abc") -> None:
        self.given_up: list[str] = []
        self.reasons: list[str] = []
        self.outcomes: list[str | None] = []
        self.join = PartJoin(parts, self.give_up, self.outcomes.append)

    def give_up(self, part: str, reason: str) -> None:
        self.given_up.append(part)
        self.reasons.append(reason)


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_ready_when_the_last_part_is(order: tuple[str, ...]) -> None:
    watched = Watched()
    for part in order:
        assert watched.outcomes == []
        watched.join.ready(part)
    assert watched.outcomes == [None]
    assert watched.given_up == []


@pytest.mark.parametrize("order", list(permutations("abc")))
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_the_first_failure_gives_up_the_others_and_is_the_reason(order: tuple[str, ...], failing: int) -> None:
    watched = Watched()
    done: list[str] = []
    for part in order:
        assert watched.outcomes == []
        if len(done) >= 3 - failing:
            watched.join.failed(part, f"{part} broke")
        else:
            watched.join.ready(part)
        done.append(part)
    first = order[3 - failing]
    assert watched.given_up == sorted(set("abc") - set(order[: 4 - failing]))
    assert all(first in reason for reason in watched.reasons)
    assert watched.outcomes == [f"{first} broke"]


def test_a_part_that_gets_ready_while_given_up_does_not_save_the_whole() -> None:
    watched = Watched("ab")
    watched.join.failed("a", "gone")
    assert watched.outcomes == []  # b may still be written
    watched.join.ready("b")
    assert watched.outcomes == ["gone"]


def test_a_part_ends_once() -> None:
    watched = Watched("ab")
    watched.join.ready("a")
    watched.join.failed("a", "too late")
    watched.join.ready("unknown")
    assert watched.outcomes == []
    watched.join.ready("b")
    watched.join.ready("b")
    watched.join.failed("b", "too late")
    assert watched.outcomes == [None]


def test_giving_up_may_end_a_part_at_once() -> None:
    outcomes: list[str | None] = []
    join = PartJoin("abc", lambda part, reason: join.failed(part, reason), outcomes.append)
    join.failed("b", "gone")
    assert outcomes == ["gone"]


def test_parts_that_end_on_many_threads_are_told_once() -> None:
    for seed in range(50):
        parts = [str(i) for i in range(8)]
        outcomes: list[str | None] = []
        join = PartJoin(parts, lambda part, reason: None, outcomes.append)
        random.Random(seed).shuffle(parts)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda part, join=join: join.failed(part, part) if part == "3" else join.ready(part), parts))
        assert outcomes == ["3"]


def test_no_parts_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="without parts"):
        Watched("")


def test_tickets_of_parts() -> None:
    assert part_ticket("t", reshard(Side(LAYOUT), Side(LAYOUT))) == "t"
    tickets = {part_ticket("t", reshard(Side(LAYOUT, 2, s), Side(LAYOUT, 4, d))) for s in range(2) for d in range(4)}
    assert len(tickets) == 8
    assert "t/1-3" in tickets
