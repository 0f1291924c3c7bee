"""What routers of two builds keep together in Redis, and ask of nodes, as digests; compare them with the kept ones, or
``--write`` them.

A change that another build would read wrongly raises SHARED_STATE. One that it reads as it should is written here.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

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
        for name, value in vars(import_module(module)).items():
            if isinstance(value, str) and "redis.call" in value:
                yield f"{module}: {name}", value.encode()
            elif isinstance(value, TypeAdapter):
                yield f"{module}: {name}", json.dumps(_without_words(value.json_schema()), sort_keys=True).encode()


def _without_words(schema: Any) -> Any:
    """A schema without its descriptions."""
    if isinstance(schema, list):
        return [_without_words(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_words(part) for name, part in schema.items() if name != "description"}


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
