"""docs/internals/failures.md and the tests agree: what it names exists, and a test cites each thread that applies. The
tests that docs/guides/security.md names exist too."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "internals" / "failures.md").read_text()
SECURITY = (ROOT / "docs" / "guides" / "security.md").read_text()
TESTS, NOT_APPLICABLE = INDEX.split("## Threads that do not apply")

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
SITUATIONS = 39  # entries of the first part, and the one of all of them together


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


def ids(text: str) -> list[str]:
    """The tests that a text names."""
    return re.findall(r"`(tests/\S+?::\w+)`", text)


def situations() -> list[tuple[str, list[str]]]:
    """Heading and test ids of every entry of the first part."""
    entries = TESTS.split("\n## Threads")[0].split("\n### ")[1:]
    return [(entry.splitlines()[0], ids(entry)) for entry in entries]


def threads() -> list[tuple[str, list[str]]]:
    """First cell and test ids of every row of the tables of threads; a thread may have several rows."""
    rows = [line for line in TESTS.splitlines() if line.startswith("| ") and "#" in line]
    return [(row.split("|")[1].strip(), ids(row)) for row in rows]


@pytest.mark.parametrize("test_id", sorted({*ids(TESTS), *ids(SECURITY)}))
def test_every_test_that_is_named_exists(test_id: str) -> None:
    assert body(test_id) is not None


@pytest.mark.parametrize("thread", CITED)
def test_every_thread_is_cited_by_its_test_or_does_not_apply(thread: str) -> None:
    cited = re.compile(re.escape(thread) + r"\b")
    if cited.search(NOT_APPLICABLE):
        return
    named = [test_id for first, tests in threads() if cited.search(first) for test_id in tests]
    assert any(cited.search(body(test_id) or "") for test_id in named), f"no test of {named} cites {thread}"


def test_every_situation_has_its_tests() -> None:
    assert len(situations()) == SITUATIONS
    assert [title for title, tests in situations() if not tests] == []


def test_no_row_lacks_a_test_and_no_thread_is_unknown() -> None:
    assert [first for first, tests in threads() if not tests] == []
    assert set(re.findall(r"[\w-]+ #\d+", INDEX)) == set(CITED)


def test_a_missing_test_is_noticed() -> None:
    assert body("tests/test_failure_index.py::test_nobody_wrote") is None
    assert body("tests/test_nowhere.py::test_a") is None
