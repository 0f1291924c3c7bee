"""The page about other people's clients names the versions that `make clients` installs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = {"psutil", "pytest", "pytest-asyncio", "pytest-timeout"}  # what the tests themselves need
PIN = re.compile(r"(?P<name>@?[\w./-]+?)(?:\[\w+\])?(?:==|@)(?P<version>[\d.]+)$")


def pins() -> set[str]:
    """``name version`` of everything that is installed for the tests."""
    asked = (ROOT / "tests/clients/requirements.txt").read_text(encoding="utf-8").splitlines()
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if line.startswith(("CLIENT_PROGRAMS :=", "NODE_CLIENTS :=")):
            asked += line.partition(":=")[2].split()
    found = [PIN.match(one) for one in asked if not one.startswith("#") and re.split("[<>=]", one)[0] not in OURS]
    return {f"{pin['name']} {pin['version']}" for pin in found if pin}


def test_every_version_is_on_the_page() -> None:
    """Mutants: a newer version in requirements.txt, and in the Makefile."""
    page = (ROOT / "docs/guides/clients.md").read_text(encoding="utf-8").replace("`", "")
    asked = pins()
    assert len(asked) == 19
    assert {pin for pin in asked if pin not in page} == set()
