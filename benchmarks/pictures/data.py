"""Where the pictures lie, and the kept data that they are drawn from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

HANDOFF_TRACE = RESULTS / "handoff_trace.json"
SPECULATION = RESULTS / "speculation_cpu.json"
SWEEP = RESULTS / "sweep_cpu.json"
UPGRADE = RESULTS / "upgrade_cpu.json"
SERVING = RESULTS / "serving_cpu.json"
