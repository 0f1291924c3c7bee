"""Counts of speculation, per sequence (algorithms.md G6). Acceptance length counts the bonus token."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.speculation import PREDICTION


@dataclass
class SpecStats:
    """What one sequence's rounds drafted and had accepted."""

    accepted_per_round: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    drafted_per_position: list[int] = field(default_factory=list)  # rounds whose tree reached depth d+1
    accepted_per_position: list[int] = field(default_factory=list)  # rounds that accepted at depth d+1
    rounds_by_drafter: dict[str, int] = field(default_factory=dict)
    predicted_tokens: int = 0  # of draft_tokens: those of the request's prediction
    accepted_predicted_tokens: int = 0
    draft_s: float = field(default=0.0, compare=False)  # of the rounds this sequence took part in: drafting
    verify_s: float = field(default=0.0, compare=False)  # the target's forward and acceptance

    def add(
        self,
        num_draft_tokens: int,
        tree_depth: int,
        num_accepted: int,
        drafter: str = "",
        draft_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        """Count one round: nodes drafted (root excluded), depth of the tree, length of the accepted path."""
        if drafter:
            self.rounds_by_drafter[drafter] = self.rounds_by_drafter.get(drafter, 0) + 1
        if drafter == PREDICTION:
            self.predicted_tokens += num_draft_tokens
            self.accepted_predicted_tokens += num_accepted
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.accepted_per_round.append(num_accepted)
        self.draft_tokens += num_draft_tokens
        for counts, reached in ((self.drafted_per_position, tree_depth), (self.accepted_per_position, num_accepted)):
            counts.extend([0] * (tree_depth - len(counts)))
            for d in range(reached):
                counts[d] += 1

    @property
    def rounds(self) -> int:
        """Draft-verify rounds, K=0 rounds included."""
        return len(self.accepted_per_round)

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(self.accepted_per_round)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per round, the bonus counted; 0 before the first round."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 0.0
