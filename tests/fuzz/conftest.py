"""One deployment for all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.deployment import Deployment, deployment


@pytest.fixture(scope="session")
def served() -> Iterator[Deployment]:
    with deployment() as made:
        yield made
