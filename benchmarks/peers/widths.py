"""``paceline bench widths``: engines with weights of 16, 8 and 4 bits, one stream and several side by side.

Every engine gets the same prompts, of a length that no cache knows, and gives the same number of tokens. They run one
after the other on all cores, and in rounds, forwards and backwards, so that a machine that slows down slows all of
them. `benchmarks.peers.width_goals` says which ratios are asked for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.common.processes import NotReady, ended_by_signals
from benchmarks.peers.engines import Engine, Timing, engines
from benchmarks.peers.servers import CONTEXT, SLOTS, cores
from benchmarks.serving import questions
from benchmarks.serving.arrivals import Arrival
from benchmarks.serving.workload import Ask, warm_up
from benchmarks.serving.workload import plan as plan_asks
from benchmarks.speculation.prompts import Prompt
from paceline.errors import ConfigError
from paceline.models.config import ModelSpec

PROMPTS = (128, 512, 1024)  # tokens of the times to the first token
DECODE_PROMPT = 128  # tokens before those that are decoded
ALONE = 3  # streams, one after the other
FIRSTS = 3  # prompts of each length; their median counts
NAMES = ("paceline", "llama.cpp", "openvino")
MESSAGE_CHARACTERS = 300

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class WidthsPlan:
    """Requests that every engine gets, in this order."""

    warm_up: list[Ask]  # one after the other
    alone: list[Ask]  # one after the other
    beside: list[Ask]  # all at once, twice: the first time is not counted
    firsts: dict[int, list[Ask]]  # one after the other, by asked tokens of the prompt
    prompts: str

    def groups(self) -> list[list[Ask]]:
        """What is sent side by side, group after group."""
        single = [*self.warm_up, *self.alone]
        first = [ask for asks in self.firsts.values() for ask in asks]
        return [*([ask] for ask in single), self.beside, self.beside, *([ask] for ask in first)]


@dataclass(frozen=True)
class Figures:
    """One engine in one round, or its best ones."""

    alone: float  # tokens/s of one stream after its first token
    beside: float  # tokens/s of SLOTS streams, while all of them decode
    first_ms: dict[int, float]  # median, by asked tokens of the prompt


@dataclass(frozen=True)
class Row:
    """One line of the table. One without figures has a reason."""

    name: str
    weights: str
    bits: int
    rounds: list[Figures] = field(default_factory=list)
    reason: str = ""

    @property
    def best(self) -> Figures | None:
        """Each figure's best of the rounds, for what else runs on the machine only slows it down."""
        if not self.rounds:
            return None
        first = {n: min(one.first_ms[n] for one in self.rounds) for n in self.rounds[0].first_ms}
        return Figures(max(one.alone for one in self.rounds), max(one.beside for one in self.rounds), first)


@dataclass(frozen=True)
class WidthsReport:
    """The results."""

    model: str
    cores: int
    amx: bool  # whether they have its instructions, which decide much here
    prompts: str
    max_tokens: int
    hidden_size: int
    rows: list[Row]

    def to_json(self) -> str:
        """See WidthsReport."""
        return TypeAdapter(WidthsReport).dump_json(self).decode()

    @classmethod
    def read(cls, path: Path) -> WidthsReport:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None

    def best(self, name: str, weights: str) -> Figures | None:
        """The figures of an engine with these weights; None where it has none."""
        return next((row.best for row in self.rows if (row.name, row.weights) == (name, weights)), None)


def plan(folder: Path, texts: Sequence[Prompt], named: str, max_tokens: int) -> WidthsPlan:
    """Prompts which all begin differently. Raises ConfigError."""
    if DECODE_PROMPT + max_tokens > CONTEXT:
        raise ConfigError("max_tokens", f"{max_tokens} leaves no room for a prompt in {CONTEXT} tokens")
    count = questions.counter(folder, chat=True)
    lengths = [*((DECODE_PROMPT, max_tokens) for _ in range(ALONE + SLOTS)), *((n, 2) for n in PROMPTS * FIRSTS)]
    asks = plan_asks([Arrival(0.0, *one) for one in lengths], texts, count, 0)
    decode, rest = asks[: ALONE + SLOTS], asks[ALONE + SLOTS :]
    firsts = {n: rest[i :: len(PROMPTS)] for i, n in enumerate(PROMPTS)}
    return WidthsPlan(warm_up(asks, count, 2), decode[:ALONE], decode[ALONE:], firsts, named)


def run(
    plan: WidthsPlan, model: str, folder: Path, only: Sequence[str], rounds: int, progress: Progress
) -> WidthsReport:
    """Measure every engine, or those named. Raises ConfigError."""
    for name in only:
        if name not in NAMES:
            raise ConfigError("only", f"{name!r} is none of {', '.join(NAMES)}")
    chosen = [engine for engine in engines(model, folder) if not only or engine.name in only]
    with ended_by_signals():
        rows = measure(chosen, plan, rounds, progress)
    hidden = ModelSpec.from_folder(folder).hidden_size
    amx = "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return WidthsReport(folder.name, cores(), amx, plan.prompts, plan.alone[0].max_tokens, hidden, rows)


def measure(chosen: Sequence[Engine], plan: WidthsPlan, rounds: int, progress: Progress) -> list[Row]:
    """A row for each engine, in their order. One that fails is not asked again."""
    found: dict[int, list[Figures]] = {i: [] for i in range(len(chosen))}
    reasons = {i: reason for i, engine in enumerate(chosen) if (reason := engine.missing())}
    for turn in range(rounds):
        for place, i in enumerate(found if turn % 2 == 0 else reversed(found)):
            engine = chosen[i]
            if i in reasons:
                continue
            progress(turn * len(chosen) + place, rounds * len(chosen), f"{engine.name} {engine.weights}")
            try:
                found[i].append(figures(plan, engine.ask(plan.groups())))
            except (NotReady, ConfigError) as error:
                reasons[i] = str(error).strip()[-MESSAGE_CHARACTERS:]
    return [Row(e.name, e.weights, e.bits, found[i], reasons.get(i, "")) for i, e in enumerate(chosen)]


def figures(plan: WidthsPlan, timings: Sequence[Sequence[Timing]]) -> Figures:
    """What the answers to ``plan.groups()`` say. Raises ConfigError where one has another length than was asked."""
    for group, answers in zip(plan.groups(), timings, strict=True):
        for ask, timing in zip(group, answers, strict=True):
            asked, came = (ask.prompt_tokens, ask.max_tokens), (timing.prompt_tokens, timing.tokens)
            if asked != came or not timing.stamps:
                raise ConfigError("peers", f"asked for {asked[0]} + {asked[1]} tokens, got {came[0]} + {came[1]}")
    skipped, singles = len(plan.warm_up), [group[0] for group in timings if len(group) == 1]
    alone, first = singles[skipped : skipped + len(plan.alone)], singles[skipped + len(plan.alone) :]
    took_s = sum(one.stamps[-1] - one.stamps[0] for one in alone)
    last_beside = [group for group in timings if len(group) > 1][-1]
    medians, start = {}, 0
    for tokens, asks in plan.firsts.items():
        medians[tokens] = 1e3 * statistics.median(one.stamps[0] for one in first[start : start + len(asks)])
        start += len(asks)
    return Figures(sum(one.tokens - 1 for one in alone) / took_s, together(last_beside), medians)


def together(streams: Sequence[Timing]) -> float:
    """Tokens/s of all streams from the moment when the last of them has its first token to the end of the first.

    A piece of text counts for as many tokens as the stream's pieces have on average. Raises ConfigError where there is
    no such time.
    """
    start, end = max(one.stamps[0] for one in streams), min(one.stamps[-1] for one in streams)
    if start >= end:
        raise ConfigError("peers", f"{len(streams)} streams were never decoded side by side")
    counted = sum(sum(start < at <= end for at in one.stamps) * one.tokens / len(one.stamps) for one in streams)
    return counted / (end - start)
