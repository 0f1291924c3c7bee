"""Which reason counts for a test of a peer's that does not pass."""

from __future__ import annotations

import pytest

from tests.clients.peers.reasons import REASONS, UNEXPLAINED, Reason, Result, once, read_rules, reason, rules_of

RULES = read_rules(
    [
        {"test": "one", "error": "a.c", "reason": "model", "why": "first"},
        {"test": "one", "reason": "weak", "why": "second"},
    ]
)


@pytest.mark.parametrize(
    ("test", "outcome", "error", "expected"),
    [
        ("x::one", "failed", "abc", ("model", "first")),
        ("x::one", "failed", "ab", ("weak", "second")),
        ("x::one", "skipped", "ab", ("weak", "second")),
        ("x::two", "skipped", "abc", ("skipped", "")),
        ("x::two", "failed", "abc", (UNEXPLAINED, "")),
    ],
)
def test_the_first_rule_counts_that_matches(test: str, outcome: str, error: str, expected: tuple[str, str]) -> None:
    """Mutants: either pattern decides alone, the last rule counts, or what no rule explains is counted as skipped."""
    assert reason(Result(test, outcome, error), RULES) == expected


def test_a_test_counts_once() -> None:
    """Mutant: a pass hides the failure of the end that follows it, or the other way round."""
    results = [Result("a", "passed", ""), Result("a", "failed", "late"), Result("b", "failed", "x")]
    assert once([*results, Result("b", "passed", "")]) == results[1:]


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_the_rules_have_reasons_of_the_list(peer: str) -> None:
    assert {rule.reason for rule in rules_of(peer)} <= set(REASONS) == set(Reason)
