"""What every round drafted and accepted, request by request, to compare a deployment with the one-process run."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from paceline.engine.model_runner import ModelRunner
from paceline.request import SequenceRequest
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.exactness import Outcome


@dataclass(frozen=True)
class Drafted:
    """One round's tree."""

    drafter: str
    token_ids: tuple[int, ...]  # the root first
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Rounds:
    """One request's answer, and the tree of each of its rounds."""

    outcome: Outcome
    drafted: tuple[Drafted, ...]

    @property
    def accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(self.outcome.accepted_per_round)

    def by_place(self) -> dict[int, Drafted]:
        """Each round's tree, by how many tokens the rounds before it committed."""
        places = accumulate((accepted + 1 for accepted in self.outcome.accepted_per_round), initial=0)
        return dict(zip(places, self.drafted, strict=False))


class RoundLog:
    """Every tree that a runner's drafter proposes from now on, by request id."""

    def __init__(self, runner: ModelRunner) -> None:
        self._trees: dict[str, list[Drafted]] = {}
        drafter = runner.drafter
        propose = drafter.propose

        def proposed(seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
            trees = propose(seqs, budgets)
            for seq, tree in zip(seqs, trees, strict=True):
                drafted = Drafted(tree.drafter or drafter.name, tree.token_ids, tree.parents)
                self._trees.setdefault(seq.request.request_id, []).append(drafted)
            return trees

        drafter.propose = proposed  # type: ignore[method-assign]

    def rounds(self, requests: Seq[SequenceRequest], outcomes: Seq[Outcome]) -> dict[str, Rounds]:
        """Outcomes with their trees, by request id."""
        found = {}
        for request, outcome in zip(requests, outcomes, strict=True):
            name = request.request_id
            found[name] = Rounds(outcome, tuple(self._trees.get(name, ())))
            assert len(found[name].drafted) == len(outcome.accepted_per_round)
        return found


def differing(expected: dict[str, Rounds], got: dict[str, Rounds]) -> list[str]:
    """Requests that differ in tokens, logit bits, drafted trees or accepted lengths, and from which round on."""
    wrong = []
    for name, together in expected.items():
        apart = got[name]
        if apart.outcome.token_ids != together.outcome.token_ids:
            wrong.append(f"{name}: tokens {apart.outcome.token_ids} where {together.outcome.token_ids} are right")
        if apart.outcome.logit_bits != together.outcome.logit_bits:
            wrong.append(f"{name}: logit bits")
        ours, theirs = (list(zip(r.drafted, r.outcome.accepted_per_round, strict=True)) for r in (together, apart))
        if ours != theirs:
            first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), "the end")
            wrong.append(f"{name}: round {first} of {len(ours)}: accepted {apart.outcome.accepted_per_round}")
    return wrong
