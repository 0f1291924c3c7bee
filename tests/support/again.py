"""Runs the tests that failed in the last run once more, one after another with nothing beside them.

Many tests watch a clock, and side by side three of them share two cores. A test that fails alone too has failed. One
that passes is named, so that nobody takes it for sound.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

MOST = 5  # with more, something is broken
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    """Exit code 0 when all of them pass."""
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.is_file() else []
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed: at most {MOST} are run again")
        return 1
    print(f"again, alone: {' '.join(failed)}", flush=True)
    if code := pytest.main(failed):
        return int(code)
    print(f"UNSTABLE: failed beside other tests and passed alone: {' '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
