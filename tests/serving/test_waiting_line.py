"""The bounded line in front of a node's pages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from paceline.errors import Overloaded
from paceline.serving.waiting import WaitingLine


@dataclass(eq=False)
class Guest:
    name: str
    deadline: float = 10.0


def line_of(*guests: Guest) -> WaitingLine[Guest]:
    line: WaitingLine[Guest] = WaitingLine(3)
    for guest in guests:
        line.add(guest)
    return line


def test_a_full_line_refuses() -> None:
    line = line_of(Guest("a"), Guest("b"), Guest("c"))
    with pytest.raises(Overloaded):
        line.add(Guest("d"))
    assert len(line) == 3


def test_nobody_overtakes_the_head() -> None:
    a, b, c = Guest("a"), Guest("b"), Guest("c")
    line = line_of(a, b, c)
    seen: list[str] = []

    def start(guest: Guest) -> bool:
        seen.append(guest.name)
        return guest.name != "b"

    assert line.admit(start) == []
    assert seen == ["a", "b"]
    assert b in line
    assert c in line


def test_one_that_fails_leaves_and_the_next_gets_its_turn() -> None:
    a, b = Guest("a"), Guest("b")
    line = line_of(a, b)
    error = RuntimeError("no")

    def start(guest: Guest) -> bool:
        if guest is a:
            raise error
        return True

    assert line.admit(start) == [(a, error)]
    assert len(line) == 0


def test_deadlines_apply_anywhere_in_line() -> None:
    a, b, c = Guest("a", 5.0), Guest("b", 1.0), Guest("c", 2.0)
    line = line_of(a, b, c)
    assert line.expire(2.0) == [b, c]
    assert len(line) == 1
    assert not line.discard(b)
    assert line.discard(a)
