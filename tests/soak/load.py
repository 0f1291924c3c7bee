"""So many turns, some at once, each compared with the reference of what it asks."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from paceline.client import DeadlineExceeded, PacelineError
from tests.soak.answers import Heard, wrong_when_complete, wrong_when_cut
from tests.soak.asks import Ask, Leave, Turn, make_turn
from tests.soak.calls import Calls

PATIENCE_S = 120.0  # for one whole request
FIRST_GUESS_S = 0.2
SMOOTHING = 0.2  # of the usual times
STAYS = ("mid-stream", "near the end")  # until so much of the answer is there


@dataclass
class Usual:
    """How long something takes, of late; seconds."""

    value_s: float = FIRST_GUESS_S

    def note(self, seconds: float) -> None:
        self.value_s += SMOOTHING * (seconds - self.value_s)


@dataclass
class Load:
    """Runs turns 0 to ``turns`` and counts what became of them."""

    calls: Calls
    asks: Sequence[Ask]
    right: Sequence[Heard]
    seed: int
    turns: int
    ended: int = 0
    complete: int = 0
    tokens: int = 0  # received
    kinds: Counter[str] = field(default_factory=Counter)  # of requests that were answered to their end
    left: Counter[str] = field(default_factory=Counter)  # by how and when
    wrong: list[str] = field(default_factory=list)
    _first: dict[int, Usual] = field(default_factory=lambda: defaultdict(Usual))  # by ask: to the first token
    _whole: dict[int, Usual] = field(default_factory=lambda: defaultdict(Usual))  # to the last

    async def run(self, at_once: int) -> None:
        """All turns, ``at_once`` of them at a time. Once."""
        numbers = iter(range(self.turns))

        async def worker() -> None:
            for number in numbers:
                await self._serve(make_turn(self.seed, number, self.asks))

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())

    async def _serve(self, turn: Turn) -> None:
        ask, right = self.asks[turn.which], self.right[turn.which]
        heard, began = Heard(right.choices), time.monotonic()
        await self._ask(turn, ask, heard, right)
        self.ended += 1
        self.tokens += sum(len(answer.token_ids) for answer in heard.answers.values())
        if heard.complete:
            self.complete += 1
            self.kinds[ask.kind] += 1
            self._whole[turn.which].note(time.monotonic() - began)
            wrong = wrong_when_complete(heard, right)
        elif turn.leave is not None:
            self.left[f"{turn.way}, {turn.leave.how} {turn.leave.moment}"] += 1
            wrong = wrong_when_cut(heard, right)
        else:
            wrong = [*heard.problems, "lost: it did not end"]
        self.wrong += [f"{turn}: {ask.kind}: {what}" for what in wrong]

    async def _ask(self, turn: Turn, ask: Ask, heard: Heard, right: Heard) -> None:
        leave, began = turn.leave, time.monotonic()

        def enough(so_far: Heard) -> bool:
            if not seen and so_far.share_of(right) > 0.0:
                seen.append(time.monotonic() - began)
                self._first[turn.which].note(seen[0])
            return leave is not None and leave.moment in STAYS and so_far.share_of(right) >= leave.share

        seen: list[float] = []
        try:
            async with asyncio.timeout(self._stay_s(turn)):
                await self.calls.make(turn, ask, heard, enough, self._deadline_s(turn))
        except DeadlineExceeded as error:
            if leave is None or leave.how != "deadline":
                heard.problems.append(repr(error))
        except TimeoutError:
            if leave is None or time.monotonic() - began > PATIENCE_S:
                heard.problems.append(f"no end within {PATIENCE_S:g} s")
        except (PacelineError, httpx.HTTPError) as error:
            heard.problems.append(repr(error))

    def _stay_s(self, turn: Turn) -> float:
        """After which the client goes away, whatever it has."""
        match turn.leave:
            case Leave("closes", "before the first token", share):
                return share * self._first[turn.which].value_s
            case Leave("closes", "at any time", share):
                return share * self._whole[turn.which].value_s
        return PATIENCE_S

    def _deadline_s(self, turn: Turn) -> float | None:
        if turn.leave is None or turn.leave.how != "deadline":
            return None
        return turn.leave.share * self._whole[turn.which].value_s
