"""Generate the gRPC stubs from ``proto/``; compare them with the committed ones, or ``--write`` them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("paceline/v1")


def generate(out: Path) -> None:
    """Write all stubs below ``out``."""
    sources = sorted(str(p.relative_to(ROOT / "proto")) for p in (ROOT / "proto").rglob("*.proto"))
    # protoc finds its plugins on PATH; ours lie beside this interpreter, whose venv need not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, *sources]) != 0:
        raise SystemExit("protoc failed")


def main() -> None:
    """See the module docstring."""
    if "--write" in sys.argv:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {p.name: p.read_text() for p in (Path(scratch) / PACKAGE).iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / PACKAGE).glob("*_pb2*")}
    if fresh != committed:
        names = sorted(n for n in fresh.keys() | committed.keys() if fresh.get(n) != committed.get(n))
        raise SystemExit(f"stubs differ from proto/: {', '.join(names)}\nrun `make proto` and commit the result")
    print(f"proto: {len(fresh)} stubs match")


if __name__ == "__main__":
    main()
