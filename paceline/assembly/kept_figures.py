"""What a node measured of itself at an earlier start: seconds of its rounds, and how its heads did.

Neither changes the text. Both take seconds to measure, are the same for the same weights, drafter, kernels, processor
and options, and rounds refine the costs anyway, so a later start takes them from ``$PACELINE_HOME/measured``. What
cannot be read there is measured anew; at most ``MOST_FILES`` files are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.assembly.head_check import HeadReport
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.layers.build import cache_folder, cpu_identity
from paceline.spec_decode.length.cost import Grid

log = logging.getLogger(__name__)

MOST_FILES = 32
VERSION = 1  # of the files; another is measured anew
# Options that change neither what a round costs nor how heads do.
WITHOUT = {"host", "cores_group", "cores_slot", "weight_file", "log_level", "log_format", "trace_requests"}
WITHOUT |= {"tls_dir", "call_token", "ticket_key"}


@dataclass(frozen=True)
class Figures:
    """Seconds of target steps and of drafting, None where a deployment does not weigh them; the heads' report."""

    target: Grid | None
    drafts: dict[str, Grid]
    heads: HeadReport | None


NOTHING = Figures(None, {}, None)


def figures_key(runner: ModelRunner, config: NodeConfig) -> str:
    """Equal for two starts exactly when what one measured holds for the other."""
    identity, options = runner.identity, config.model_dump(mode="json", exclude=WITHOUT)
    weights = [identity.weights, identity.drafter_weights]
    named = [VERSION, weights, identity.kernels, cpu_identity(), os.cpu_count(), options]
    return hashlib.blake2b(json.dumps(named, sort_keys=True).encode(), digest_size=16).hexdigest()


def read_figures(key: str) -> Figures | None:
    """What an earlier start kept; None where it kept nothing that can be read."""
    path = _folder() / f"{key}.json"
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        target = None if kept["target"] is None else _grid(kept["target"])
        heads = None if kept["heads"] is None else HeadReport(**kept["heads"])
        figures = Figures(target, {str(name): _grid(cells) for name, cells in kept["drafts"].items()}, heads)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.info("%s cannot be used, the node measures anew: %r", path, error)
        return None
    with suppress(OSError):
        os.utime(path)  # the files used last are kept
    return figures


def keep_figures(key: str, figures: Figures) -> None:
    """Keep them for later starts. Where that is not possible, later starts measure anew. Where nothing was measured
    nothing is kept: its file would take the place of another's."""
    if figures == NOTHING:
        return
    drafts = {name: _cells(grid) for name, grid in figures.drafts.items()}
    kept = {
        "target": None if figures.target is None else _cells(figures.target),
        "drafts": drafts,
        "heads": None if figures.heads is None else asdict(figures.heads),
    }
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", delete=False) as file:
            json.dump(kept, file)
        Path(file.name).replace(folder / f"{key}.json")
        files = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in files[:-MOST_FILES]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.info("what this node measured is not kept: %s", error)


def _folder() -> Path:
    return cache_folder() / "measured"


def _cells(grid: Grid) -> dict[str, Any]:
    cells = [[grid.at(batch, column) for column in grid.columns] for batch in grid.batches]
    return {"batches": list(grid.batches), "columns": list(grid.columns), "cells": cells}


def _grid(kept: dict[str, Any]) -> Grid:
    """Raises ValueError, TypeError or KeyError for what is no grid."""
    batches, columns, cells = kept["batches"], kept["columns"], kept["cells"]
    shaped = len(cells) == len(batches) > 0 and all(len(row) == len(columns) > 0 for row in cells)
    numbers = [*batches, *columns, *(cell for row in cells for cell in row)]
    if not shaped or not all(isinstance(n, int | float) and 0 <= n < 1e6 for n in numbers):
        raise ValueError("no grid of seconds")
    if list(batches) != sorted(set(batches)) or list(columns) != sorted(set(columns)):
        raise ValueError("batches or columns do not rise")
    return Grid(batches, columns, cells)
