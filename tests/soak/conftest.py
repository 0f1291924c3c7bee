"""How many and which: ``pytest tests/soak --requests 5000 --seed N -s``, or ``make soak``."""

from __future__ import annotations

from contextlib import suppress

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("soak").addoption("--requests", type=int, default=None, help="to serve; else a short run")
    with suppress(ValueError):  # chaos runs have it too, and both may be collected
        parser.getgroup("soak").addoption("--seed", type=int, default=None, help="of requests and of who leaves when")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A long run may take its time."""
    requests = config.getoption("requests", default=None) or 0
    for item in items:
        if "soak" in item.path.parts:
            item.add_marker(pytest.mark.timeout(300 + requests))
