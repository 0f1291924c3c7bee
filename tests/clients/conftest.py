"""A small deployment for other people's clients: plain text, streams, JSON and tools, over HTTP, as they are.

`make clients` installs the clients beside the project and runs these tests there; a client that is not installed skips
its tests and says so. PACELINE_URL asks a deployment that runs already. ``--https`` (`make clients ARGS=--https`) asks
over HTTPS, with certificates of the deployment's own CA and an API key.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.other_clients import KEY, lacking
from tests.support.server import paceline, serve

MODEL = "smollm2-135m-instruct"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("clients").addoption("--https", action="store_true", help="over HTTPS, with a key")


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


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of the deployment's HTTP."""
    if running := os.environ.get("PACELINE_URL"):
        yield running
        return
    if not os.path.exists(paceline()):
        pytest.skip("needs an installed paceline")
    if not request.config.getoption("https", default=False):
        yield f"http://{request.getfixturevalue('served_model').http}"
        return
    folder = tmp_path_factory.mktemp("secured")
    options = ("--model", MODEL, "--no-standby", "--kv-cache-tokens", "16384", *_secured(folder))
    with pytest.MonkeyPatch.context() as patch, serve(*options) as server:
        patch.setenv("SSL_CERT_FILE", str(folder / "certs" / "ca.pem"))
        patch.setenv("OPENAI_API_KEY", KEY)
        yield f"https://{server.http}"


def _secured(folder: Path) -> list[str]:
    """Options of a deployment with certificates, whose only key is that of all clients here."""
    certs, keys = folder / "certs", folder / "keys.yaml"
    subprocess.run([paceline(), "certs", "init", str(certs), "--hosts", "127.0.0.1"], check=True, capture_output=True)
    keys.write_text(f"keys:\n- {{id: clients, sha256: {hashlib.sha256(KEY.encode()).hexdigest()}, tenant: clients}}\n")
    keys.chmod(0o600)
    return ["--tls-dir", str(certs), "--api-keys", str(keys)]


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the model that is served."""
    return MODEL
