"""What came of the grid's answers by drafter: each is judged by its schema, and compared with plain decoding's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cluster.verification.answers import Answer, largest_gap, parting
from paceline.errors import PacelineError
from paceline.results import Choice
from tests.soak.json_asks import JsonAsk
from tests.soak.kills import Streams


def request_id_of(drafter: str, at: int) -> str:
    """How the request at this place is named when this drafter is asked for it."""
    return f"{drafter}-{at}"


def drafter_of(request_id: str) -> str:
    """The drafter in such a name."""
    return request_id.rpartition("-")[0]


@dataclass
class Tally:
    """What came of the answers of one drafter."""

    answers: int = 0
    valid: int = 0
    cut: int = 0  # by its length, or by a stop text
    invalid: int = 0
    different: int = 0
    lost: int = 0  # ended by an error
    moved: int = 0  # whose node was killed in mid-stream, and which went on elsewhere
    rounds: int = 0
    committed: int = 0  # tokens of these rounds
    accepted: int = 0

    def add(self, other: Mapping[str, int]) -> None:
        """Count another run's as well."""
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class Outcome:
    """What came of a run. ``wrong`` tells each answer that is."""

    by_drafter: dict[str, Tally] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    streams: Streams = field(default_factory=Streams)

    def of(self, drafter: str) -> Tally:
        """The tally of a drafter."""
        return self.by_drafter.setdefault(drafter, Tally())

    def note(self, ask: JsonAsk, drafter: str, got: Sequence[Choice], right: Sequence[Answer]) -> None:
        """Judge and compare one answer."""
        tally, answers = self.of(drafter), [Answer.of(choice) for choice in got]
        tally.answers += 1
        for choice in got:
            stats = choice.completion.speculation
            tally.rounds += stats.rounds
            tally.accepted += stats.accepted_tokens
            tally.committed += stats.rounds + stats.accepted_tokens
        found = parting(answers, right) or (largest_gap(answers, right) and "log-probabilities")
        if found:
            tally.different += 1
            self.wrong.append(f"{drafter}, {ask.asked.told}: {found}")
        words = {ask.judge(answer) for answer in answers}
        if wrong := words - {"valid", "cut"}:
            tally.invalid += 1
            self.wrong.append(f"{drafter}, {ask.asked.told}: {wrong}")
        elif "cut" in words:
            tally.cut += 1
        else:
            tally.valid += 1

    def lose(self, ask: JsonAsk, drafter: str, error: PacelineError) -> None:
        """An answer that was not whole."""
        self.of(drafter).answers += 1
        self.of(drafter).lost += 1
        self.wrong.append(f"{drafter}, {ask.asked.told}: {type(error).__name__}: {error}")

    def count_moved(self, log: str) -> None:
        """Count the streams that lost their node. log: the deployment's."""
        for request_id in self.streams.moved(log):
            self.of(drafter_of(request_id)).moved += 1

    @property
    def answers(self) -> int:
        """All that came, or were lost."""
        return sum(tally.answers for tally in self.by_drafter.values())

    def figures(self) -> dict[str, Any]:
        """For a file of results."""
        return {
            "kills": dict(self.streams.kills),
            "sequences_on_killed_nodes": self.streams.running_when_killed,
            "by_drafter": {name: asdict(tally) for name, tally in self.by_drafter.items()},
        }


HEAD = ("drafter", "answers", "valid", "cut", "invalid", "as plain", "different", "lost", "killed", "tokens a round")


def table(tallies: Mapping[str, Tally]) -> str:
    """One line a drafter. killed: in mid-stream, by the loss of a node; these answers went on elsewhere."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for name, t in tallies.items():
        a_round = f"{t.committed / t.rounds:.2f}" if t.rounds else "-"
        same = t.answers - t.different - t.lost
        cells = (name, t.answers, t.valid, t.cut, t.invalid, same, t.different, t.lost, t.moved, a_round)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
