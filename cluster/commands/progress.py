"""What a command that starts a deployment is waiting for, on stderr: a line that changes on a terminal, one line for
each thing waited for elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cluster.parts import Tell


@contextmanager
def start_progress(console: Console, lines: bool) -> Iterator[Tell]:
    """Yields what a deployment tells. lines: no line that changes, as it would not go with log lines beside it."""
    if lines or not console.is_terminal:
        yield _Lines(console).tell
        return
    columns = (SpinnerColumn(), TextColumn("waiting for {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("the start", total=None)

        def tell(what: str, details: str) -> None:
            progress.update(task, description=f"{what}: {details}" if details else what)

        yield tell


class _Lines:
    """A line for each thing that is waited for; details change too often for that."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, ""

    def tell(self, what: str, details: str) -> None:
        if what != self._last:
            self._console.print(f"waiting for {what}", soft_wrap=True)
        self._last = what
