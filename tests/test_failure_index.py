"""docs/internals/failures.md and the tests agree: what it names exists, and a test cites each thread that applies."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "internals" / "failures.md").read_text()
TESTS, NOT_APPLICABLE = INDEX.split("## Does not apply")

THREADS = {
    "sglang": "12151 7147 29110 25388 9224 40297 24527 35049 26399 23020 25287 33507 32527 35890 24568",
    "vllm": "38900 50792 52234 52232 29906 46283 49238",
    "TensorRT-LLM": "16691 12313 13824 13713",
    "dynamo": "13442 7489 7930 7634 7072",
    "smg": "2382 2225",
    "vllm-router": "294",
    "llm-d-router": "2853 1736",
    "llm-d-kv-cache": "372",
    "aibrix": "2287",
    "tokenspeed": "166",
    "production-stack": "1035",
}
CITED = [f"{project} #{number}" for project, numbers in THREADS.items() for number in numbers.split()]
SITUATIONS = 17  # rows of the failure table, of ways in between, and all of them together


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text()


def body(test_id: str) -> str | None:
    """The text of a test function, or None when there is no such test."""
    path, name = test_id.split("::")
    if not (ROOT / path).is_file():
        return None
    found = re.search(
        rf"^(?:async )?def {name}\(.*?(?=^\S|\Z)(?:^\) -> None:.*?(?=^\S|\Z))?", source(path), re.M | re.S
    )
    return found and found[0]


def rows(text: str) -> list[tuple[str, list[str]]]:
    """First cell and test ids of every row of every table."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and "tests/" in line]
    return [(line.split("|")[1].strip(), re.findall(r"`(tests/\S+?::\w+)`", line)) for line in lines]


@pytest.mark.parametrize("test_id", sorted({test_id for _, ids in rows(TESTS) for test_id in ids}))
def test_every_test_it_names_exists(test_id: str) -> None:
    assert body(test_id) is not None


@pytest.mark.parametrize("thread", CITED)
def test_every_thread_is_cited_by_its_test_or_does_not_apply(thread: str) -> None:
    cited = re.compile(re.escape(thread) + r"\b")
    if cited.search(NOT_APPLICABLE):
        return
    ids = [test_id for first, ids in rows(TESTS) if cited.search(first) for test_id in ids]
    assert any(cited.search(body(test_id) or "") for test_id in ids), f"no test of {ids} cites {thread}"


def test_every_situation_has_its_tests() -> None:
    table = rows(TESTS.split("## Threads")[0])
    assert len(table) == SITUATIONS
    assert all(ids for _, ids in table)


def test_no_row_lacks_a_test_and_no_thread_is_unknown() -> None:
    assert all(ids for _, ids in rows(TESTS))
    assert set(re.findall(r"[\w-]+ #\d+", INDEX)) == set(CITED)


def test_a_missing_test_is_noticed() -> None:
    assert body("tests/test_failure_index.py::test_nobody_wrote") is None
    assert body("tests/test_nowhere.py::test_a") is None
