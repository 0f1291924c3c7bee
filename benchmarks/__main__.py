"""``make bench``: every table of the foundation."""

from __future__ import annotations

import argparse
import os
import sys

from rich.console import Console
from rich.table import Table

from benchmarks import engine
from benchmarks.serving import overhead
from paceline.models.hub import resolve_model
from paceline.models.quantization.round_to_nearest import SCHEMES


def show(title: str, rows: list[engine.Row]) -> bool:
    """Print a table; whether every bound holds."""
    table = Table(title=title)
    for column in ("what", "measured", "reach", ""):
        table.add_column(column)
    for row in rows:
        table.add_row(row.name, row.value, row.bound, {None: "", True: "holds", False: "MISSED"}[row.holds])
    Console().print(table)
    return all(row.holds is not False for row in rows)


def main() -> None:
    """Run the parts asked for; exit 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--only", choices=["engine", "serving"], help="one part; both when not given")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantize", default="none", choices=["none", *SCHEMES], help="of the engine's part")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder = resolve_model(options.model)
    held = True
    if options.only != "serving":
        held &= show("engine, one process", engine.run(folder, options.threads, options.quantize))
    if options.only != "engine":
        held &= show("serving, 1 prefill + 1 decode node", overhead.run(options.model))
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
