"""How long the streams that a fault hit were without a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.results import RequestTrace
from tests.chaos.faults import Fault
from tests.chaos.load import Served

ONE_CHUNK = 1  # prefill sends one token; who has had more lives without it
AFTERMATH_S = 3.0  # attempts on a victim that begin so soon after the fault and fail are its doing


@dataclass(frozen=True)
class Hit:
    """A choice of a request that a fault hit."""

    fault: Fault
    request_id: str
    kind: str  # of the request
    choice: int
    since: float  # Unix time
    gap_s: float  # without a token from then on, the longest after the fault, or after the attempt that met it began
    story: str

    def compound(self, faults: Iterable[Fault]) -> bool:
        """Whether another fault came before the next token."""
        return any(self.since < other.at < self.since + self.gap_s for other in faults)


@dataclass(frozen=True)
class Attempt:
    """One try of the router's. Times are Unix time."""

    began: float
    ended: float
    prefill: str
    decode: str
    outcome: str


def attempts_of(trace: RequestTrace, request_id: str, choice: int, choices: int) -> list[Attempt]:
    """What the router tried for a choice."""
    sequence = request_id if choices == 1 else f"{request_id}#{choice}"
    return [
        Attempt(
            event.start_s,
            event.end_s or event.start_s,
            str(event.attributes["prefill"]),
            str(event.attributes["decode"]),
            str(event.attributes["outcome"]),
        )
        for event in trace.events
        if event.sequence == sequence and event.name == "attempt"
    ]


def hits_of(fault: Fault, served: Served, trace: RequestTrace) -> list[Hit]:
    """The choices of a request that a fault hit."""
    found = []
    for choice, arrivals in served.arrivals.items():
        attempts = attempts_of(trace, served.request_id, choice, len(served.answers))
        for attempt in attempts:
            if not _met(fault, attempt, arrivals):
                continue
            since, gap_s = _longest_gap(max(fault.at, attempt.began), fault.until + AFTERMATH_S, arrivals, served.ended)
            story = "; ".join(f"{a.prefill}>{a.decode} {a.ended - a.began:.2f} s {a.outcome[:150]}" for a in attempts)
            found.append(Hit(fault, served.request_id, served.kind, choice, since, gap_s, story))
            break
    return found


def _longest_gap(start: float, end: float, arrivals: Sequence[float], ended: float) -> tuple[float, float]:
    """Since when there was no token for longest, and for how long; of the gaps that begin from ``start`` to ``end``."""
    points = [start, *([at for at in arrivals if at > start] or [ended])]
    gap_s, since = max((after - before, before) for before, after in pairwise(points) if before <= end)
    return since, gap_s


def _met(fault: Fault, attempt: Attempt, arrivals: Sequence[float]) -> bool:
    """Whether an attempt depended on what the fault took: it ran on it then, or came later and failed."""
    blamed = attempt.outcome == "silent" or any(node in attempt.outcome for node in fault.victims)
    later = fault.at < attempt.began < fault.until + AFTERMATH_S and blamed
    if not later and not attempt.began <= fault.at <= attempt.ended:
        return False
    had = sum(attempt.began <= at <= fault.at for at in arrivals)
    needs_prefill = had <= ONE_CHUNK and attempt.prefill != attempt.decode
    if len(fault.victims) == 2:
        return needs_prefill and {attempt.prefill, attempt.decode} == set(fault.victims)
    return attempt.decode in fault.victims or (needs_prefill and attempt.prefill in fault.victims)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def alone(hits: Iterable[Hit], faults: Sequence[Fault]) -> list[Hit]:
    """Those whose fault was the only one until the stream went on."""
    return [hit for hit in hits if not hit.compound(faults)]


def had_spare(hit: Hit, hits: Iterable[Hit]) -> bool:
    """Whether there was somewhere to go. A pause that several faults claim, since one began where another ended, had a
    spare only if each of them left one."""
    return all(
        other.fault.spare
        for other in hits
        if (other.request_id, other.choice) == (hit.request_id, hit.choice)
        and other.since < hit.since + hit.gap_s
        and hit.since < other.since + other.gap_s
    )


def table(hits: Sequence[Hit], faults: Sequence[Fault]) -> str:
    """Recovery time by kind of fault, with and without a spare; of what another fault hit meanwhile apart."""
    groups: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for hit in hits:
        spare = had_spare(hit, hits)
        if hit.compound(faults):
            groups[spare, "then another"].append(hit.gap_s)
            continue
        groups[spare, hit.fault.kind].append(hit.gap_s)
        groups[spare, "all"].append(hit.gap_s)
    lines = [f"{'':10} {'fault':12} {'streams hit':>11} {'p50 s':>8} {'p99 s':>8} {'longest':>8}"]
    for (spare, kind), gaps in sorted(groups.items(), key=lambda item: (not item[0][0], item[0][1])):
        numbers = f"{percentile(gaps, 0.5):8.2f} {percentile(gaps, 0.99):8.2f} {max(gaps):8.2f}"
        lines.append(f"{'spare' if spare else 'no spare':10} {kind:12} {len(gaps):11} {numbers}")
    return "\n".join(lines)
