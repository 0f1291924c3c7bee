"""What a start waits for: a line that changes on a terminal, a line for each thing elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from cluster.commands.progress import start_progress


def told(terminal: bool, lines: bool) -> str:
    """What is on stderr after a start."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, _environ={})
    with start_progress(console, lines) as tell:
        tell("Ray", "")
        tell("2 nodes", "")
        tell("2 nodes", "decode-0 is importing")
    return out.getvalue()


def test_without_a_terminal_each_thing_has_one_line() -> None:
    assert told(terminal=False, lines=False) == "waiting for Ray\nwaiting for 2 nodes\n"


def test_beside_log_lines_a_terminal_has_lines_too() -> None:
    assert told(terminal=True, lines=True) == "waiting for Ray\nwaiting for 2 nodes\n"


def test_a_terminal_shows_details_and_is_left_clean() -> None:
    shown = told(terminal=True, lines=False)
    assert "2 nodes: decode-0 is importing" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased
