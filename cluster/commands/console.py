"""Where commands write what is not their result: errors and progress, on stderr."""

from __future__ import annotations

from rich.console import Console

errors = Console(stderr=True, highlight=False, emoji=False)  # ":x:" of an address is no picture
