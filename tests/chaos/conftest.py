"""How long, how many and which: ``pytest tests/chaos --minutes 3 --streams 16 --seed N``, or ``make chaos``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.chaos.deployed import write_models

    return write_models(tmp_path_factory.mktemp("chaos"))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("chaos")
    group.addoption("--minutes", type=float, default=None, help="of faults, of each layout; else a short run of one")
    group.addoption("--kills", type=int, default=None, help="ranks to kill (test_ranks.py)")
    group.addoption("--streams", type=int, default=None, help="streams at once")
    with suppress(ValueError):  # soak runs have it too, and both may be collected
        group.addoption("--seed", type=int, default=None, help="of requests, fault times and victims")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A long run may take its time, and what start, undisturbed answers and end take."""
    minutes = config.getoption("minutes", default=None) or 0.0
    kills = config.getoption("kills", default=None) or 0
    for item in items:
        if "chaos" in item.path.parts:
            item.add_marker(pytest.mark.timeout(300 + 60 * minutes + 20 * kills))
