"""``python -m tests.support.other_torch VERSION``: types and quick tests under another torch than the lock has.

It makes an environment in a folder of its own, which it removes at the end: that torch with what it brings, and all
else as requirements.lock has it. Types are checked and warnings are errors, as ``make check-types`` and ``make quick``
have it. It takes 6 GB of disk where the package index has CUDA builds alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)==([^\s\\;]+)([^\\\n]*)", re.MULTILINE)
QUICK = "not slow and not real_model and not e2e and not multihost"


def pins(lock: str, there: set[str]) -> Iterator[str]:
    """Lines of a lock without hashes, but for packages that are there already."""
    for name, version, marker in PIN.findall(lock):
        if name not in there:
            yield f"{name}=={version}{marker.rstrip()}"


def install(folder: Path, version: str) -> Path:
    """The interpreter of an environment with this torch. Raises CalledProcessError where it cannot be had."""
    python = folder / "venv" / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")

    def run(*words: str, **more: str) -> str:
        environment = {"UV_SYSTEM_CERTS": "1"} | os.environ | more
        return subprocess.run([str(uv), *words], check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout

    run("venv", "-q", "--seed", "--python", sys.executable, str(python.parents[1]))
    into = ("--python", str(python))
    run("pip", "install", "-q", *into, f"torch=={version}")
    there = {name for name, _, _ in PIN.findall(run("pip", "freeze", *into))}
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(pins((ROOT / "requirements.lock").read_text(encoding="utf-8"), there)))
    run("pip", "install", "-q", *into, "-c", str(constraints), "-e", f"{ROOT}[node,dev]", f"torch=={version}")
    return python


def main() -> None:
    """See the module docstring. The exit code is 1 where a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.other_torch", description=__doc__)
    parser.add_argument("version", help="of torch, such as 2.11.0")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        python = install(Path(folder), version)
        side_by_side = ("-p", "tests.support.side_by_side", "--workers", "2", "-o", "console_output_style=classic")
        checks = [
            ["-m", "mypy", "--cache-dir", f"{folder}/mypy"],
            ["-m", "pytest", *side_by_side, "-m", QUICK, "-q"],
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        codes = [subprocess.run([str(python), *check], cwd=ROOT, env=environment).returncode for check in checks]
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
