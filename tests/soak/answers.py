"""What a client received, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One choice, as far as it was received."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""


@dataclass
class Heard:
    """One request as its client saw it. HTTP streams tell tokens at their end only."""

    choices: int
    answers: dict[int, Answer] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    closed: bool = False  # the stream ended by itself

    def of(self, choice: int) -> Answer:
        """The answer of a choice, made at need."""
        return self.answers.setdefault(choice, Answer())

    @property
    def complete(self) -> bool:
        """Every choice has ended, and so has the stream."""
        ended = sum(bool(answer.finish_reason) for answer in self.answers.values())
        return self.closed and ended == self.choices

    def share_of(self, right: Heard) -> float:
        """How much of ``right`` this is: of its tokens, of its text where no tokens are known. 0 to 1."""
        for name in ("token_ids", "text"):
            got = sum(len(getattr(answer, name)) for answer in self.answers.values())
            if got:
                return got / max(1, sum(len(getattr(answer, name)) for answer in right.answers.values()))
        return 0.0


def wrong_when_complete(heard: Heard, right: Heard) -> list[str]:
    """What differs from the right answer."""
    found = list(heard.problems)
    if heard.answers.keys() != right.answers.keys():
        return [*found, f"choices {sorted(heard.answers)} where {sorted(right.answers)} were due"]
    for choice, answer in heard.answers.items():
        for name in ("token_ids", "text", "finish_reason"):
            got, due = getattr(answer, name), getattr(right.answers[choice], name)
            if got != due:
                found.append(f"choice {choice}: {name} {_difference(got, due)}")
    return found


def wrong_when_cut(heard: Heard, right: Heard) -> list[str]:
    """What of a part is not the beginning of the right answer. A choice that ended is compared whole."""
    found = list(heard.problems)
    for choice, answer in heard.answers.items():
        due = right.answers.get(choice)
        if due is None:
            found.append(f"choice {choice} where {sorted(right.answers)} were due")
            continue
        if answer.finish_reason and answer.finish_reason != due.finish_reason:
            found.append(f"choice {choice}: finish_reason {_difference(answer.finish_reason, due.finish_reason)}")
        for name in ("token_ids", "text"):
            got, whole = getattr(answer, name), getattr(due, name)
            if got != whole[: len(got)]:
                found.append(f"choice {choice}: {name} {_difference(got, whole)}")
    return found


def _difference(got: Sequence[Any], right: Sequence[Any]) -> str:
    if isinstance(got, str) and len(got) < 10 and len(right) < 10:
        return f"{got!r} where {right!r} is right"
    at = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
    return f"differ at {at} of {len(right)}: {got[at : at + 3]!r} where {right[at : at + 3]!r} is right"
