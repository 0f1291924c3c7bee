"""Why a test of a peer does not pass: one reason of a fixed list for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

UNEXPLAINED = "unexplained"
RULES = Path(__file__).with_name("rules.yaml")


class Reason(Enum):
    """What keeps a test from passing. The values are names; `REASONS` says what they mean."""

    INTERNAL = "internal"
    FLAGS = "flags"
    MODEL = "model"
    REFUSED = "refused"
    ROUTE = "route"
    WEAK = "weak"
    WORDING = "wording"
    CHOICE = "choice"
    SKIPPED = "skipped"


REASONS = {
    Reason.INTERNAL: "uses the peer's own code, and asks no server, or not alone",
    Reason.FLAGS: "needs a server that was started with other options",
    Reason.MODEL: "needs a model or an adapter that is not served",
    Reason.REFUSED: "asks for something that is not offered, and is refused by name",
    Reason.ROUTE: "asks a path that is not there",
    Reason.WEAK: "needs an answer of a more able model than the small one that is served",
    Reason.WORDING: "wants the peer's own words, names or version",
    Reason.CHOICE: "wants something that is another way here on purpose",
    Reason.SKIPPED: "skipped by the peer's own test",
}


@dataclass(frozen=True)
class Result:
    """A test that was run. error: the end of what pytest says of it."""

    test: str
    outcome: str
    error: str


@dataclass(frozen=True)
class Rule:
    """Tests whose name and error match patterns fail for this reason. why: what the reason is here."""

    test: re.Pattern[str]
    error: re.Pattern[str]
    reason: Reason
    why: str


def read_rules(items: Iterable[dict[str, Any]]) -> list[Rule]:
    """Rules as `rules.yaml` has them. Raises ValueError for a reason that is none."""
    return [
        Rule(
            re.compile(one.get("test", "")), re.compile(one.get("error", "")), Reason(one["reason"]), one.get("why", "")
        )
        for one in items
    ]


def rules_of(peer: str) -> list[Rule]:
    """The rules of all peers, then those of this one."""
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return read_rules([*rules["all"], *rules[peer]])


def reason(result: Result, rules: Sequence[Rule]) -> tuple[str, str]:
    """The reason, by the first rule that matches, and what it is here; `UNEXPLAINED` and nothing where none does."""
    for rule in rules:
        if rule.test.search(result.test) and rule.error.search(result.error):
            return rule.reason.value, rule.why
    if result.outcome == "skipped":
        return Reason.SKIPPED.value, ""
    return UNEXPLAINED, ""


def once(results: Iterable[Result]) -> list[Result]:
    """One result for each test: its last, and a failure rather than a pass, since an end can fail after a call."""
    found: dict[str, Result] = {}
    for result in results:
        before = found.get(result.test)
        if before is None or before.outcome == "passed":
            found[result.test] = result
    return list(found.values())
