"""The tables of ``paceline bench widths``: figures of each engine, and the ratios that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.peers.engines import Q4_K, SUPER_BLOCK
from benchmarks.peers.servers import SLOTS
from benchmarks.peers.widths import ALONE, DECODE_PROMPT, FIRSTS, PROMPTS, Figures, Row, WidthsReport
from benchmarks.tables import Grid

ALONE_GOALS = (  # ours, llama.cpp's, at least
    ("w8a8", "Q8_0", 1.5),
    ("w4a8", "Q4_0", 1.4),
    ("Q4_1", "Q4_1", 1.2),
    (Q4_K, Q4_K, 1.2),
)
BESIDE_GOAL = 1.3
OURS = {16: "bf16", 8: "w8a8", 4: "w4a8"}  # what stands for Paceline's first tokens at a width
FIRST_BITS = (16, 8)  # widths whose first token may come no later than OpenVINO's


@dataclass(frozen=True)
class Goal:
    """A ratio that is asked for."""

    what: str
    asked: float
    reached: float | None  # None: a figure is missing
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """Whether it is reached; None where a figure is missing."""
        if self.reached is None:
            return None
        return self.reached <= self.asked if self.at_most else self.reached >= self.asked


def goals(report: WidthsReport) -> list[Goal]:
    """All that is asked for, in the order of the table."""
    return [*_alone(report), *_beside(report), *_first(report)]


def _alone(report: WidthsReport) -> Iterator[Goal]:
    written = {row.weights for row in report.rows}
    for ours, theirs, least in ALONE_GOALS:
        if ours == Q4_K and Q4_K not in written:
            continue  # a note says why
        a, b = report.best("paceline", ours), report.best("llama.cpp", theirs)
        named = f"one stream, {ours}" + (" file" if ours == theirs else "")
        yield Goal(f"{named} / llama.cpp {theirs}", least, a.alone / b.alone if a and b else None)


def _beside(report: WidthsReport) -> Iterator[Goal]:
    kinds = [(bits, row.weights) for bits in OURS for row in report.rows if (row.name, row.bits) == ("paceline", bits)]
    for bits, ours in kinds:
        a = report.best("paceline", ours)
        peers = _measured(report, bits, "llama.cpp", "openvino")
        named, reached = f"the best of llama.cpp and openvino at {bits} bits", None
        if peers:
            row, best = max(peers, key=lambda pair: pair[1].beside)
            named = f"{row.name} {row.weights}, {named}"
            complete = len({row.name for row, _ in peers}) == 2
            reached = a.beside / best.beside if a and complete else None
        yield Goal(f"{SLOTS} streams, {ours} / {named}", BESIDE_GOAL, reached)


def _first(report: WidthsReport) -> Iterator[Goal]:
    for bits in FIRST_BITS:
        a, peers = report.best("paceline", OURS[bits]), _measured(report, bits, "openvino")
        for tokens in PROMPTS:
            named, reached = f"openvino at {bits} bits", None
            if peers:
                row, best = min(peers, key=lambda pair: pair[1].first_ms[tokens])
                named = f"{row.name} {row.weights}"
                reached = a.first_ms[tokens] / best.first_ms[tokens] if a else None
            yield Goal(f"first token of {tokens}, {OURS[bits]} / {named}", 1.0, reached, at_most=True)


def _measured(report: WidthsReport, bits: int, *names: str) -> list[tuple[Row, Figures]]:
    return [(row, row.best) for row in report.rows if row.bits == bits and row.name in names and row.best]


def goal_grid(report: WidthsReport) -> Grid:
    """A row for each ratio."""
    rows = tuple(
        (
            goal.what,
            f"{'<=' if goal.at_most else '>='} {goal.asked:g}",
            "-" if goal.reached is None else f"{goal.reached:.2f}",
            {None: "not measured", True: "holds", False: "MISSED"}[goal.holds],
        )
        for goal in goals(report)
    )
    return Grid("what is asked for", ("ratio", "asked", "reached", ""), rows, tuple(False for _ in rows), ())


def grid(report: WidthsReport) -> Grid:
    """A row for each engine and its weights, widths apart."""
    first = (f"first of {tokens}, ms" for tokens in PROMPTS)
    columns = ("engine", "weights", "tokens/s alone", f"tokens/s of {SLOTS}", *first)
    rows = tuple((row.name, row.weights, *_cells(row.best)) for row in report.rows)
    bits = [row.bits for row in report.rows]
    ends = tuple(a != b for a, b in zip(bits, [*bits[1:], 0], strict=True))
    title = f"widths: {report.model}, {report.cores} cores {'with' if report.amx else 'without'} AMX"
    return Grid(title, columns, rows, ends, tuple(_notes(report)))


def _cells(best: Figures | None) -> list[str]:
    if best is None:
        return ["-"] * (2 + len(PROMPTS))
    return [f"{best.alone:.1f}", f"{best.beside:.1f}", *(f"{best.first_ms[tokens]:.0f}" for tokens in PROMPTS)]


def _notes(report: WidthsReport) -> Iterator[str]:
    rounds = max((len(row.rounds) for row in report.rows), default=0)
    yield (
        f"Plain, greedy, {report.prompts}, {DECODE_PROMPT} + {report.max_tokens} tokens past any end of text; {ALONE} "
        f"single streams; first token: median of {FIRSTS} prompts. Best of {rounds} round(s)."
    )
    yield (
        "Paceline is served in one node and asked over HTTP as llama.cpp's server is. Types of GGUF are the same files "
        "for both."
    )
    yield (
        "OpenVINO runs in the process that times it, with its pipeline that batches continuously and keys and values "
        "of 16 bits. It computes in bf16 where the processor has it, or in f32 as rows say, which lets it round the "
        "inputs of its layers to int8. Its bf16 weights lie in the file as f16."
    )
    if Q4_K not in {row.weights for row in report.rows}:
        yield (
            f"Q4_K has no row: it takes {SUPER_BLOCK} weights of a row together, which the model's rows, of "
            f"{report.hidden_size} and more, are no multiples of."
        )
    yield from (f"{row.name} {row.weights}: {row.reason}" for row in report.rows if row.reason)
