"""The report of a run, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import typer

from cluster.verification.answers import number, shown
from cluster.verification.run import Difference, Evidence, Verification
from cluster.verification.sides import Side
from paceline.request import TokenLogprobs


def show_difference(difference: Difference, first: str) -> None:
    """Print where two answers part, and what both sides say of it."""
    asked, at = difference.asked, difference.at
    where = f"{asked.told}, choice {at.choice}"
    if at.index is None:
        typer.echo(f"{where}: tokens are equal, {at.what} differs between {first} and {difference.other}")
        return
    typer.echo(f"{where}: differs at token {at.index}")
    if difference.text_before:
        typer.echo(f"  after {difference.text_before!r}")
    if difference.evidence is not None:
        for name, evidence in zip((first, difference.other), difference.evidence, strict=True):
            typer.echo(f"  {name}: {_told(evidence)}")
        typer.echo(f"  {_verdict(difference.evidence, at.tokens)}")


def _told(evidence: Evidence) -> str:
    token = "the answer has ended" if evidence.token is None else f"token {evidence.token}"
    entry = evidence.logprobs
    if entry is None:
        tail = ", no log-probabilities"
    else:
        pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
        best = ", ".join(f"{token_id} at {value:.6f}" for token_id, value in pairs)
        tail = f", log-probability {entry.logprob:.6f}; best: {best}"
    return token + tail + ("" if evidence.repeats else " (asked again, it answered otherwise)")


def _verdict(evidence: tuple[Evidence, Evidence], tokens: tuple[int | None, int | None]) -> str:
    one, two = (one.logprobs for one in evidence)
    unsteady = [side for side, piece in zip(("the first", "the second"), evidence, strict=True) if not piece.repeats]
    if unsteady:
        return f"{' and '.join(unsteady)} does not repeat its own answer"
    if one is None or two is None:
        return "the distributions cannot be compared"
    gap = _gap(one, two)
    if gap == 0.0:
        return "the distributions are equal: the token was chosen otherwise"
    return f"the distributions differ, by {gap:.3g} at most where both show a token"


def _gap(one: TokenLogprobs, two: TokenLogprobs) -> float:
    mine, theirs = (dict(zip(e.top_ids, e.top_logprobs, strict=True)) for e in (one, two))
    if not (both := mine.keys() & theirs.keys()):
        return float("inf")
    return max((abs(mine[i] - theirs[i]) for i in both if mine[i] != theirs[i]), default=0.0)


def show_report(done: Verification, sides: Sequence[Side], say: Callable[[str], None]) -> None:
    """Print how many answers are equal, and who gave them."""
    for name, score in done.scores.items():
        say(f"{score.equal} of {score.compared} answers are equal to those of {name}")
        if score.gap:
            say(f"  log-probabilities of equal answers differ by {score.gap:.3g} at most")
        if (hidden := score.compared - score.equal - len(score.differences)) > 0:
            say(f"  {hidden} more differ and are not shown")
    if not done.scores:
        say(f"{done.done} answers were recorded")
    for side in sides:
        about = {key: value for key, value in asdict(side.about).items() if value}
        say(f"{side.name}: " + ", ".join(f"{key} {_printable(value)}" for key, value in about.items()))


def _printable(value: object) -> str:
    """What a side says of itself. Another one than ours may send what a terminal obeys."""
    text = str(value)
    return text if text.isprintable() else repr(text)


def report_json(done: Verification, sides: Sequence[Side]) -> dict[str, Any]:
    """The same, with every difference that was looked into."""
    return {
        "requests": done.done,
        "sides": [{"name": side.name, **asdict(side.about)} for side in sides],
        "against": [
            {
                "name": name,
                "compared": score.compared,
                "equal": score.equal,
                "largest_logprob_gap": number(score.gap),
                "differences": [_difference(one) for one in score.differences],
            }
            for name, score in done.scores.items()
        ],
    }


def _difference(one: Difference) -> dict[str, Any]:
    evidence = one.evidence or ()
    return {
        "request": one.asked.number,
        "choice": one.at.choice,
        "what": one.at.what,
        "index": one.at.index,
        "tokens": one.at.tokens,
        "text_before": one.text_before,
        "logprobs": [None if piece.logprobs is None else shown(piece.logprobs) for piece in evidence],
        "repeats": [piece.repeats for piece in evidence],
    }
