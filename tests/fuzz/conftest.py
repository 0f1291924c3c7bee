"""One deployment for all of it, and one record of what was found."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.campaign import FULL, KEEP, SEED, Kept
from tests.fuzz.deployment import Deployment, deployment


@pytest.fixture(scope="session")
def served() -> Iterator[Deployment]:
    with deployment() as made:
        yield made


@pytest.fixture(scope="session")
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """Written at the end where a file is named, also of a run that failed."""
    found: Kept = {}
    yield found
    if KEEP:
        told = {
            "made_by": f"PACELINE_FUZZ_KEEP={KEEP} PACELINE_FUZZ_SEED={SEED} make fuzz-surface",
            "messages": FULL,
            "tests_failed": request.session.testsfailed,
            "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"cores": os.cpu_count(), "processor": _processor(), "python": platform.python_version()},
            "found": found,
        }
        Path(KEEP).write_text(json.dumps(told, indent=1) + "\n")


def _processor() -> str:
    """Its name, as Linux says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
