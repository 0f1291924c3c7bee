"""What stands about tests beside the tests themselves is true: the index of shared modules, the list of slow tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.index import index, split

TESTS = Path(__file__).parent


def test_the_readme_lists_every_shared_module() -> None:
    assert split()[1] == index(), "run: python tests/support/index.py --write"


def test_slow_tests_are_there() -> None:
    """A test that was renamed or removed leaves the list."""
    for line in (TESTS / "slow.txt").read_text().splitlines():
        if not line.startswith("#"):
            file, _, test = line.partition("::")
            text = (TESTS.parent / file).read_text()
            assert not test or f"def {test.rpartition('::')[2]}(" in text, line


def test_clients_are_tested_where_there_is_no_grpc() -> None:
    """`make clients` has an environment of its own, without grpcio and torch."""
    code = "import sys; sys.modules |= {'grpc': None, 'torch': None}; import tests.clients.conftest"
    subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, check=True, timeout=60)
