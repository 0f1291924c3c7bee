"""A plugin of pytest for the tests of vLLM and SGLang: their imports get stand-ins, and every result is written down.

PEER_TESTS_RESULTS names the file: a JSON object per test and line, with ``test``, ``outcome`` and ``error``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import peer_stand_ins  # type: ignore[import-not-found]  # it stands beside this file
import pytest

MOST = 2000  # characters of an error

peer_stand_ins.install(Path.cwd())  # before any conftest.py of theirs is read


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What is theirs must not be used while a test runs."""
    peer_stand_ins.running = True
    try:
        return (yield)
    finally:
        peer_stand_ins.running = False


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test is its call; what fails or is skipped before counts for it, and so does a failure after it."""
    if report.when == "call" or not report.passed:
        _note(report.nodeid, report.outcome, report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported counts as one test."""
    if report.failed:
        _note(report.nodeid, report.outcome, report)


def _note(test: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    with Path(os.environ["PEER_TESTS_RESULTS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "error": text[-MOST:]}) + "\n")
