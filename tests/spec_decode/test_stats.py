"""Counts of a sequence's rounds."""

from __future__ import annotations

from paceline.spec_decode.stats import SpecStats


def test_nothing_before_the_first_round() -> None:
    stats = SpecStats()
    assert (stats.rounds, stats.accepted_tokens, stats.acceptance_length) == (0, 0, 0.0)


def test_rounds_of_different_depth() -> None:
    stats = SpecStats()
    stats.add(num_draft_tokens=3, tree_depth=3, num_accepted=3)
    stats.add(num_draft_tokens=4, tree_depth=2, num_accepted=1)
    stats.add(num_draft_tokens=0, tree_depth=0, num_accepted=0)  # a plain step counts as a round
    stats.add(num_draft_tokens=5, tree_depth=5, num_accepted=0)
    assert stats.rounds == 4
    assert stats.draft_tokens == 12
    assert stats.accepted_per_round == [3, 1, 0, 0]
    assert stats.accepted_tokens == 4
    assert stats.drafted_per_position == [3, 3, 2, 1, 1]
    assert stats.accepted_per_position == [2, 1, 1, 0, 0]
    assert stats.acceptance_length == 2.0  # 4 accepted and 4 bonus tokens over 4 rounds


def test_sequences_do_not_share_counts() -> None:
    first, second = SpecStats(), SpecStats()
    first.add(1, 1, 1)
    assert second.rounds == 0
    assert second.drafted_per_position == []
