"""Where the commands print: tables on stdout, progress and messages on stderr."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PIPE_WIDTH = 160  # characters of a line that no terminal bounds
LINE_EVERY_S = 5.0  # seconds from one line of a bar to the next, at least, where stderr is no terminal

messages = Console(stderr=True, highlight=False)
tables_on = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def step(done: int, total: int, what: str) -> None:
    """Write a line to stderr: ``done`` of ``total`` parts of a work are done, and ``what`` begins."""
    print(f"{done}/{total} {what}", file=sys.stderr, flush=True)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr, as the function that moves it; lines of ``step`` where stderr is no terminal."""
    if not messages.is_interactive:
        yield _lines(what)
        return
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


def _lines(what: str) -> Callable[[int, int, str], None]:
    """``step``, which leaves out what comes within LINE_EVERY_S of the line before."""
    print(f"{what}: loading", file=sys.stderr, flush=True)
    last = -math.inf

    def show(done: int, total: int, now: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            step(done, total, f"{what}: {now}")
            last = time.monotonic()

    return show
