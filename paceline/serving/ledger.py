"""A node's books: who holds its pages. On the engine thread only."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.sequence import Sequence


def pages_available(runner: ModelRunner, live: Iterable[Sequence]) -> int:
    """Pages that new requests can get: free ones, and cached ones that no live sequence shares."""
    held = {ref.page for seq in live for ref in seq.table.pages}
    return runner.allocator.num_pages - len(held)


def pool_problems(runner: ModelRunner, live: Iterable[Sequence]) -> list[str]:
    """What is wrong with allocator and prefix cache; empty when no page is lost and none is owned twice."""
    owned = [ref for seq in live for ref in seq.table.pages]
    if runner.prefix is None:
        return runner.allocator.check_integrity(owned)
    return runner.allocator.check_integrity(owned + runner.prefix.pages) + runner.prefix.check_integrity()
