"""What routers of two builds keep together in Redis, and ask of nodes, as digests; compare them with the kept ones, or
``--write`` them.

A change that another build would read wrongly raises SHARED_STATE. One that it reads as it should is written here.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from pydantic import TypeAdapter

from cluster.state.published import SHARED_STATE

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "cluster" / "state" / "shared_state.json"
PROTOS = ("common", "inference", "node", "trace")  # those of the hand-off are between nodes of one build


def digests() -> dict[str, str]:
    """Digest by part: messages, scripts that Redis runs, and records that lie there as JSON."""
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in sorted(_parts())}


def _parts() -> Iterator[tuple[str, bytes]]:
    for name in PROTOS:
        yield f"{name}.proto", import_module(f"paceline.v1.{name}_pb2").DESCRIPTOR.serialized_pb
    for path in (*(ROOT / "cluster" / "state").glob("*.py"), ROOT / "cluster" / "access" / "redis_counters.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if scripts := list(_scripts(path.read_text(encoding="utf-8"))):
            yield f"{module}: scripts", "\n".join(scripts).encode()
        for name, value in vars(import_module(module)).items():
            if isinstance(value, TypeAdapter):
                yield f"{module}: {name}", json.dumps(value.json_schema(), sort_keys=True).encode()


def _scripts(source: str) -> Iterator[str]:
    """Texts of a module that call Redis from within it."""
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None and "redis.call" in (text := ast.unparse(value)):
            yield text


def main() -> None:
    """See the module docstring."""
    if "--write" in sys.argv:
        kept = {"shared_state": SHARED_STATE, "parts": digests()}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    elif changed := changes():
        sys.exit(f"changed: {', '.join(changed)}")


def changes() -> list[str]:
    """Parts that are not as they were kept, and ``SHARED_STATE`` if it is not."""
    kept, found = json.loads(KEPT.read_text(encoding="utf-8")), digests()
    parts = kept["parts"]
    changed = [name for name in sorted(parts.keys() | found.keys()) if parts.get(name) != found.get(name)]
    return changed + ["SHARED_STATE"] * (kept["shared_state"] != SHARED_STATE)


if __name__ == "__main__":
    main()
