"""Runs every test side by side, but those of faults and hosts: they watch a clock and run after the others.

Chaos uses all cores and runs alone. Hosts mostly wait, so one deployment runs beside them. Then the tests that failed
run once more, one after another with nothing beside them. A test that fails again has failed. One that passes is named,
so that nobody takes it for sound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ALONE, HOSTS, BESIDE_HOSTS = ("tests/chaos",), ("tests/multihost",), ("tests/soak", "tests/e2e/test_prefix_routing.py")
# Four workers for two cores: a part of a worker's time is waiting. Each further one imports torch once more.
SIDE_BY_SIDE = ("-p", "tests.support.side_by_side", "--workers", "4", "-o", "console_output_style=classic")
MOST = 5  # failed tests that run again: with more, something is broken
FAILED = 1  # pytest's exit code for failed tests; others mean that the run itself broke


def pytest_command(cache: str, *words: str) -> list[str]:
    """A run that keeps what failed in a folder of its own."""
    folder = f".pytest_cache/{cache}"
    options = ("-o", f"cache_dir={folder}", "--durations=20", "--durations-min=5")
    return [sys.executable, "-m", "pytest", "--cache-clear", *options, *words]


def failed(cache: str) -> list[str]:
    """Names of the tests that failed in a run."""
    file = Path(f".pytest_cache/{cache}/v/cache/lastfailed")
    return sorted(json.loads(file.read_text())) if file.is_file() else []


def all_parts() -> dict[str, int]:
    """Exit codes by the name of a part."""

    def exit_code(part: str, *words: str) -> int:
        return subprocess.run(pytest_command(part, *words), check=False).returncode

    clocked = (*ALONE, *HOSTS, *BESIDE_HOSTS)
    codes = {"others": exit_code("others", *SIDE_BY_SIDE, *(f"--ignore={path}" for path in clocked))}
    codes["alone"] = exit_code("alone", *ALONE)
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(pytest_command("beside", *BESIDE_HOSTS), stdout=output, stderr=output) as beside:
            codes["hosts"] = exit_code("hosts", *HOSTS)
        codes["beside"] = beside.returncode
        output.seek(0)
        print(output.read(), flush=True)
    return codes


def again(names: list[str]) -> int:
    """0 when all of them pass alone."""
    if len(names) > MOST:
        print(f"{len(names)} tests failed: at most {MOST} are run again")
        return FAILED
    print(f"again, alone: {' '.join(names)}", flush=True)
    if code := subprocess.run(pytest_command("again", *names), check=False).returncode:
        return code
    print(f"UNSTABLE: failed beside other tests and passed alone: {' '.join(names)}")
    return 0


def main() -> int:
    """Exit code 0 when every test passed, at the first try or alone."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # else each of hundreds of processes compiles all that it imports
    codes = all_parts()
    if not any(codes.values()):
        return 0
    names = [name for part in codes for name in failed(part)]
    return again(names) if set(codes.values()) <= {0, FAILED} and names else max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
