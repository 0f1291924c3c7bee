"""Asks every side, a few requests at a time, and compares what they answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cluster.verification.answers import Answer, Parting, largest_gap, parting
from cluster.verification.asked import Asked
from cluster.verification.sides import Side
from paceline.request import TokenLogprobs

TOP_LOGPROBS = 5  # shown of each side where answers part
MAX_DETAILED = 20  # differences that are asked again and shown; further ones are counted
TEXT_BEFORE = 60  # characters of the text ahead of the difference


@dataclass(frozen=True)
class Evidence:
    """What a side says when it is asked again with log-probabilities."""

    token: int | None  # at the place where the answers part; None: its answer has ended
    logprobs: TokenLogprobs | None = None  # there; None: it cannot tell
    repeats: bool = True  # whether it answered as before


@dataclass(frozen=True)
class Difference:
    """A request that two sides answer differently."""

    asked: Asked
    other: str  # name of the side
    at: Parting
    text_before: str = ""
    evidence: tuple[Evidence, Evidence] | None = None  # of the deployment and of the other side; None: not asked again


@dataclass
class Score:
    """The answers of one other side against the deployment's."""

    compared: int = 0
    equal: int = 0
    gap: float = 0.0  # largest difference of log-probabilities in equal answers
    differences: list[Difference] = field(default_factory=list)  # at most MAX_DETAILED


class Verification:
    """One run. Every side is asked each request once, and again where answers part."""

    def __init__(
        self,
        first: Side,
        others: Sequence[Side],
        on_difference: Callable[[Difference], None],
        on_answer: Callable[[Asked, Sequence[Answer]], None] = lambda asked, answers: None,
    ) -> None:
        """first: the deployment that is looked at. on_answer: called with each of its answers."""
        self._first, self._others = first, others
        self._on_difference, self._on_answer = on_difference, on_answer
        self.scores = {other.name: Score() for other in others}
        self.done = 0  # requests

    async def run(self, all_asked: Sequence[Asked], concurrency: int, progressed: Callable[[], None]) -> None:
        """Raises CannotCompare for the first request that a side does not answer; the others are given up then."""
        waiting: Iterator[Asked] = iter(all_asked)

        async def work() -> None:
            for asked in waiting:
                await self._one(asked)
                self.done += 1
                progressed()

        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(all_asked)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        for score in self.scores.values():  # in the order of the requests, not in that of their ends
            score.differences.sort(key=lambda one: one.asked.number)
            await asyncio.gather(*workers, return_exceptions=True)

    async def _one(self, asked: Asked) -> None:
        first, *answers = await asyncio.gather(*(side.answer(asked, {}) for side in (self._first, *self._others)))
        assert first is not None
        self._on_answer(asked, first)
        for other, answer in zip(self._others, answers, strict=True):
            if answer is None:
                continue
            score = self.scores[other.name]
            score.compared += 1
            at = parting(first, answer)
            if at is None:
                score.equal += 1
                score.gap = max(score.gap, largest_gap(first, answer))
            elif len(score.differences) < MAX_DETAILED:
                place = len(score.differences)
                score.differences.append(Difference(asked, other.name, at))  # holds the place while both are asked
                score.differences[place] = await self._looked_into(asked, other, at, first, answer)
                self._on_difference(score.differences[place])

    async def _looked_into(
        self, asked: Asked, other: Side, at: Parting, first: Sequence[Answer], answer: Sequence[Answer]
    ) -> Difference:
        if at.index is None:
            return Difference(asked, other.name, at)
        wanted = {"top_logprobs": max(TOP_LOGPROBS, asked.options.get("top_logprobs") or 0)}
        again = await asyncio.gather(self._first.answer(asked, wanted), other.answer(asked, wanted))
        evidence = [
            _evidence(at, token, before[at.choice], now)
            for token, before, now in zip(at.tokens, (first, answer), again, strict=True)
        ]
        return Difference(
            asked, other.name, at, _text_before(first[at.choice], answer[at.choice]), (evidence[0], evidence[1])
        )


def _evidence(at: Parting, token: int | None, before: Answer, now: Sequence[Answer] | None) -> Evidence:
    assert at.index is not None
    if now is None:
        return Evidence(token)
    if at.choice >= len(now):
        return Evidence(token, repeats=False)
    again = now[at.choice]
    end = at.index + 1
    entry = again.logprobs[at.index] if at.index < len(again.logprobs) else None
    same = again.token_ids[:end] == before.token_ids[:end]
    return Evidence(token, entry if again.token_ids[: at.index] == before.token_ids[: at.index] else None, same)


def _text_before(one: Answer, two: Answer) -> str:
    same = 0
    for a, b in zip(one.text, two.text, strict=False):
        if a != b:
            break
        same += 1
    return one.text[max(0, same - TEXT_BEFORE) : same]
