"""The GPU benchmark's table and its JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from benchmarks.gpu.bench import Figure, Options
from benchmarks.gpu.floors import Ceilings
from benchmarks.gpu.rows import Row
from benchmarks.speculation.synthetic import LABEL

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "numpy", "safetensors")
COMMIT_VARIABLE = "PACELINE_COMMIT"  # for copies of the tree without its history


@dataclass(frozen=True)
class Result:
    """One row: a figure, or why there is none."""

    row: Row
    figure: Figure | None
    missing: str = ""
    took_s: float = 0.0

    @property
    def verdict(self) -> str:
        """holds, MISSED, WRONG, or nothing where there is no bound or no figure."""
        if self.figure is None:
            return ""
        if self.figure.wrong:
            return "WRONG"
        if self.row.reach is None:
            return ""
        return "holds" if self.row.reach.holds(self.figure.value) else "MISSED"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of it: why there is no figure, or why the reach was missed."""
        if self.figure is None:
            return (self.missing,)
        label = ("synthetic acceptance",) if self.figure.synthetic else ()
        wrong = (self.figure.wrong,) if self.figure.wrong else ()
        return (*label, *wrong, *(self.figure.hints if self.verdict in ("MISSED", "WRONG") else ()))


@dataclass(frozen=True)
class Host:
    """Where it ran."""

    device: str
    memory_bytes: int
    python: str
    versions: dict[str, str]
    cuda: str
    commit: str

    @classmethod
    def read(cls, device: torch.device) -> Host:
        """Read what this process runs on."""
        name, memory = platform.processor() or platform.machine(), 0
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            name, memory = found.name, found.total_memory
        versions = {package: text for package in PACKAGES if (text := _version(package))}
        return cls(name, memory, platform.python_version(), versions, str(torch.version.cuda), _commit())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    if named := os.environ.get(COMMIT_VARIABLE):
        return named
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def table(results: Sequence[Result], options: Options, ceilings: Ceilings, host: Host) -> Table:
    """The table for a terminal; also in a log file, so it holds no colour."""
    title = f"{options.target} shape, random weights, {options.dtype}, {host.device}"
    notes = [
        f"Ceilings of this run: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s (read + written), "
        f"matrix product {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s.",
    ]
    if any(result.figure and result.figure.synthetic for result in results):
        notes.append(f"{LABEL}; table: {', '.join(f'{rate:g}' for rate in options.rates.table)}.")
    found = Table(title=title, caption="\n".join(notes), caption_justify="left", box=box.SIMPLE)
    for column in ("row", "what", "measured", "value", "reach", "", "notes"):
        found.add_column(column)
    for each in results:
        value = "" if each.figure is None else f"{each.figure.value:.3f} {each.row.unit}"
        found.add_row(
            each.row.key,
            each.row.title,
            "-" if each.figure is None else each.figure.measured,
            value,
            "" if each.row.reach is None else str(each.row.reach),
            each.verdict,
            "; ".join(each.notes),
        )
    return found


def to_json(results: Sequence[Result], options: Options, ceilings: Ceilings, host: Host) -> str:
    """Everything, raw samples in seconds included."""
    whole: dict[str, Any] = {
        "benchmark": "gpu",
        "host": asdict(host),
        "options": asdict(options),
        "ceilings": asdict(ceilings),
        "synthetic_acceptance": LABEL,
        "rows": [_row(result) for result in results],
    }
    return json.dumps(whole, indent=1)


def _row(result: Result) -> dict[str, Any]:
    row, figure = result.row, result.figure
    said: dict[str, Any] = {
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "reach": None if row.reach is None else str(row.reach),
        "verdict": result.verdict,
        "notes": list(result.notes),
        "took_s": result.took_s,
    }
    if figure is None:
        return said | {"value": None, "missing": result.missing}
    samples = {
        name: {"median_s": sample.median, "spread": sample.spread, "seconds": list(sample.seconds)}
        for name, sample in figure.samples.items()
    }
    return said | {
        "value": figure.value,
        "measured": figure.measured,
        "synthetic": figure.synthetic,
        "facts": figure.facts,
        "hints": list(figure.hints),
        "samples": samples,
    }
