"""Four hosts with a deployment: the head with router and Redis, a prefill host, two decode hosts."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.layers.build import cache_folder
from tests.multihost.deployment import Deployment, ray_up, serve
from tests.multihost.hosts import Lan, missing
from tests.multihost.small_model import write_model

OPTIONS = {"dtype": "bf16", "drafter": "ngram", "kv_cache_tokens": 32768, "threads_per_node": 1, "lease_ttl_s": 2.0}
PASSED_ON = ("PYTHONPATH", "PACELINE_KERNELS")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("hosts").addoption("--long", action="store_true", help="also the tests that wait for minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests that mostly wait run where they are asked for."""
    if not config.getoption("long", default=False):
        for item in items:
            if item.get_closest_marker("long_run"):
                item.add_marker(pytest.mark.skip(reason="only with --long: make hosts"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def lan(model_folder: Path) -> Iterator[Lan]:
    """The hosts, off again at the end. Skips where there can be none."""
    if absent := missing():
        pytest.skip(f"needs {absent}")
    environment = {"PACELINE_HOME": str(cache_folder())}
    environment |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    # Not pytest's own folder: it would keep the hosts' files of the last three runs.
    with tempfile.TemporaryDirectory(prefix="paceline-hosts-") as folder:
        shared = [model_folder, *(Path(one) for value in environment.values() for one in value.split(":"))]
        made = Lan(Path(folder) / "lan", environment, shared)
        try:
            for number, name in enumerate(("head", "prefill-1", "decode-1", "decode-2"), start=1):
                made.add(name, f"10.77.0.{number}")
            yield made
        finally:
            made.close()


@pytest.fixture(scope="session")
def deployment(lan: Lan, model_folder: Path) -> Iterator[Deployment]:
    """One prefill and two decode nodes, each pinned to the hosts of its role."""
    start = time.monotonic()
    ray_up(lan.hosts["head"], [host for name, host in lan.hosts.items() if name != "head"])
    up = time.monotonic()
    with serve(lan.hosts["head"], OPTIONS | {"model": str(model_folder)}) as made:
        print(f"\nray up {up - start:.1f} s, paceline serve ready {time.monotonic() - up:.1f} s later")
        made.wait_for({"prefill-0", "decode-0", "decode-1"}, 10.0)
        yield made
