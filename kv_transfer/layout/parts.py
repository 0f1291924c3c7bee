"""One hand-off of a sharded side is several: one part for each pair of ranks that exchange slices, on a link of its own
and with a ticket of its own. A rank joins its parts here, decode (from its sources) and prefill (to its
destinations) alike.

    OPEN --every part ready-----------------------------------> done(None)
      |
      +--a part failed--> GIVING UP --every part has ended----> done(reason)

The whole is ready only when every part is. After the first failure the others are given up, but the end is told only
when none of them is under way any more: until then their links may read or write the pages.

No node is sharded yet: the tests alone run this module, over real links, until nodes of several ranks use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kv_transfer.layout.reshard import ReshardPlan


def part_ticket(ticket: str, plan: ReshardPlan) -> str:
    """The ticket of one part; both ends derive it. The hand-off's own when neither side is sharded."""
    return f"{ticket}/{plan.source.rank}-{plan.dest.rank}" if plan.name else ticket


class PartJoin:
    """The parts of one hand-off at one rank. Every deadline is a part's own, so each part ends.

    ``give_up(part, reason)``: end a part that is under way; `ready` or `failed` of it must follow, at once or later.
    ``done(failure)``: told once; None when all parts are ready. Both are called with no lock held, on whichever thread
    brings the news, and must not raise.
    """

    def __init__(
        self, parts: Iterable[str], give_up: Callable[[str, str], None], done: Callable[[str | None], None]
    ) -> None:
        self._open = set(parts)
        if not self._open:
            raise ValueError("a hand-off without parts never ends")
        self._give_up = give_up
        self._done = done
        self._failure: str | None = None
        self._lock = threading.Lock()

    def ready(self, part: str) -> None:
        """This part is complete. Nothing happens when it has ended already."""
        self._end(part, None)

    def failed(self, part: str, reason: str) -> None:
        """This part is over and its link touches no page of it any more. Nothing happens when it has ended already."""
        self._end(part, reason)

    def _end(self, part: str, reason: str | None) -> None:
        with self._lock:
            if part not in self._open:
                return
            self._open.discard(part)
            others: tuple[str, ...] = ()
            if reason is not None and self._failure is None:
                self._failure, others = reason, tuple(sorted(self._open))
            over, failure = not self._open, self._failure
        if over:
            self._done(failure)
        for other in others:
            self._give_up(other, f"another part failed: {reason}")
