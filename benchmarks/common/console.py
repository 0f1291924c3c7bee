"""Where the commands print: tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PIPE_WIDTH = 160  # characters of a line that no terminal bounds

messages = Console(stderr=True, highlight=False)
tables_on = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, as the function that moves it."""
    columns = (
        TextColumn(f"{what}: {{task.description}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def show(done: int, total: int, now: str) -> None:
            progress.update(task, completed=done, total=total, description=now)

        yield show
