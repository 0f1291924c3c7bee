"""A small deployment for other people's clients: plain text, streams, JSON and tools, over HTTP, as they are.

`make clients` installs the clients beside the project and runs these tests there; a client that is not installed skips
its tests and says so. PACELINE_URL asks a deployment that runs already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.other_clients import lacking
from tests.support.server import paceline, serve

MODEL = "smollm2-135m-instruct"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of clients that are not installed. What a client warns of is its own affair."""
    for item in items:
        if item.path.parent.name == "clients":
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.real_model)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing := lacking(item):  # before a deployment is started for it
                item.add_marker(pytest.mark.skip(reason=f"needs {missing}"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The base URL of the deployment's HTTP."""
    if running := os.environ.get("PACELINE_URL"):
        yield running
        return
    if not os.path.exists(paceline()):
        pytest.skip("needs an installed paceline")
    with serve("--model", MODEL, "--drafter", "ngram", "--no-standby", "--kv-cache-tokens", "16384") as server:
        yield f"http://{server.http}"


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the model that is served."""
    return MODEL
