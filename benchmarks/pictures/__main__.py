"""``python -m benchmarks.pictures [NAME ...]``: draw the pictures of the documentation, all or those named, from kept
data into docs/pictures. The same data and the same matplotlib give the same files.

``python -m benchmarks.pictures.record`` makes the trace behind handoff.svg, ``python -m
benchmarks.pictures.record_upgrade`` the run behind upgrade.svg; the other data are results of ``paceline bench``
(benchmarks/results).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pictures import handoff, path, serving, speculation, style, sweep, upgrade
from benchmarks.pictures.data import PICTURES

DRAWN: dict[str, Callable[[], Any]] = {
    "path": path.draw,
    "handoff": handoff.draw,
    "speculation": speculation.draw,
    "sweep": sweep.draw,
    "serving": serving.draw,
    "upgrade": upgrade.draw,
}


def write(name: str, folder: Path) -> Path:
    """Draw one picture into ``folder``; its file. Raises ConfigError without matplotlib."""
    file = folder / f"{name}.svg"
    with style.drawing():
        style.save(DRAWN[name](), file)
    return file


def main() -> None:
    """Draw and write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(DRAWN)}; all when none is given")
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder to draw into")
    options = parser.parse_args()
    if unknown := set(options.names) - set(DRAWN):
        parser.error(f"no picture {', '.join(sorted(unknown))}; there are {', '.join(DRAWN)}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or DRAWN:
        print(write(name, options.out))


if __name__ == "__main__":
    main()
