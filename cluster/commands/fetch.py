"""A model's files, fetched with a progress bar before anything else begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from cluster.commands.console import errors


def fetch_model(model: str) -> Path:
    """Resolve a model with a progress bar on stderr."""
    from paceline.models.hub import resolve_model

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                if not errors.is_terminal:
                    errors.print(f"{model}: {what}", soft_wrap=True)
                tasks[what] = progress.add_task(f"{model}: {what}", total=1.0)
            progress.update(tasks[what], completed=share)

        return resolve_model(model, show)
