"""A node's books: who holds its pages, and whether the books are whole."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.sequence import Sequence

log = logging.getLogger(__name__)


class PageLedger:
    """What a node tells of its pool. The engine thread keeps it; other threads only read the two figures."""

    def __init__(self, runner: ModelRunner, role: str) -> None:
        self._runner = runner
        self._role = role
        self._unchecked = True
        self.free_pages = runner.allocator.num_pages  # that new requests can get
        self.integrity = ""  # the first thing that the last idle check found wrong

    def count(self, live: Iterable[Sequence]) -> None:
        """Count anew, after pages were taken or given back. ``live``: every sequence that holds some. Cached pages that
        none of them shares count as free."""
        held = {ref.page for seq in live for ref in seq.table.pages}
        self.free_pages = self._runner.allocator.num_pages - len(held)
        self._unchecked = True

    def check(self) -> None:
        """Check allocator and prefix cache at a moment when no sequence lives; does nothing until pages have moved
        again. A page that is lost or owned twice is logged, and told as ``integrity``."""
        if not self._unchecked:
            return
        self._unchecked = False
        problems = self._problems()
        self.integrity = problems[0] if problems else ""
        for problem in problems:
            log.error("KV pool of the %s node: %s", self._role, problem)

    def _problems(self) -> list[str]:
        runner = self._runner
        if runner.prefix is None:
            return runner.allocator.check_integrity([])
        return runner.allocator.check_integrity(runner.prefix.pages) + runner.prefix.check_integrity()
