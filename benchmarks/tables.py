"""Tables of the speculation benchmarks, for a terminal and for a Markdown page, from the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.speculation.bench import Report, Settings
from benchmarks.speculation.stats import Summary
from benchmarks.speculation.sweep import ADAPTIVE_FLOOR, Point, SweepReport

MAX_POSITIONS = 8  # of accepted-per-position that a table shows


@dataclass(frozen=True)
class Grid:
    """A table before it is drawn. A row with ``ends_block`` is followed by a rule."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ends_block: tuple[bool, ...]
    notes: tuple[str, ...]


def speculation_grid(report: Report) -> Grid:
    """A row per category and drafter."""
    columns = (
        "category",
        "drafter",
        "acceptance length",
        "accepted at 1, 2, ...",
        "tokens/s",
        "speed-up (95 %)",
        "draft",
        "verify",
        "equal",
    )
    rows = tuple(_summary_row(s) for s in report.summaries)
    ends = tuple(a[0] != b[0] for a, b in zip(rows, (*rows[1:], ("", "")), strict=True))
    notes = (
        "Acceptance length: tokens committed per round, the bonus counted. Accepted at d: share of rounds.",
        "Equal: prompts whose tokens are none's.",
        f"Draft, verify: cost of a round in plain steps of the category ({report.plain_step_s * 1e3:.2f} ms in all).",
        *_dropped(report.dropped, report.settings),
        _host(report.kernels, report.bit_exact),
    )
    return Grid(_title("speculation", report.settings), columns, rows, ends, notes)


def _summary_row(s: Summary) -> tuple[str, ...]:
    shown = s.accepted_per_position[:MAX_POSITIONS]
    more = " ..." if len(s.accepted_per_position) > MAX_POSITIONS else ""
    return (
        s.category,
        s.drafter,
        f"{s.acceptance_length:.2f}",
        (" ".join(f"{share:.2f}" for share in shown) or "-") + more,
        f"{s.tokens_per_s:.1f}",
        f"{s.speedup:.2f} ({s.speedup_low:.2f} to {s.speedup_high:.2f})",
        f"{s.draft_cost:.2f}",
        f"{s.verify_cost:.2f}",
        f"{s.prompts - s.unequal}/{s.prompts}",
    )


def sweep_grid(report: SweepReport) -> Grid:
    """A row per batch size and drafter."""
    columns = (
        "batch",
        "drafter",
        "tokens/s",
        "speed-up",
        "acceptance length",
        "equal",
        "adaptive / best fixed",
    )
    rows = tuple(_point_row(p) for p in report.points)
    ends = tuple(a[0] != b[0] for a, b in zip(rows, (*rows[1:], ("", "")), strict=True))
    notes = (
        *(f"{name}: {_crossover_text(at)}" for name, at in report.crossovers.items()),
        "Counted while every place is taken.",
        "Equal: requests whose tokens are none's.",
        *(["Prompts repeat: drafters that learn across requests gain by it."] if report.prompts_repeat else []),
        *_dropped(report.dropped, report.settings),
        _host(report.kernels, report.bit_exact),
    )
    return Grid(_title("batch sweep", report.settings), columns, rows, ends, notes)


def _point_row(p: Point) -> tuple[str, ...]:
    verdict = ""
    if p.to_best is not None:
        verdict = f"{p.to_best:.3f} {'holds' if p.to_best >= ADAPTIVE_FLOOR else f'MISSED (>= {ADAPTIVE_FLOOR})'}"
    return (
        str(p.batch),
        p.drafter,
        f"{p.tokens_per_s:.1f}",
        f"{p.speedup:.2f}",
        f"{p.acceptance_length:.2f}",
        f"{p.requests - p.unequal}/{p.requests}",
        verdict,
    )


def _crossover_text(at: float | None) -> str:
    return "never slower than none at the largest batch" if at is None else f"slower than none from batch {at:.1f} on"


def _title(what: str, s: Settings) -> str:
    return f"{what}: {s.model}, {s.dtype}, {s.device}, {s.threads} threads, T={s.temperature:g}, {s.max_tokens} tokens"


def _dropped(dropped: dict[str, int], settings: Settings) -> Sequence[str]:
    if not dropped:
        return ()
    counts = ", ".join(f"{count} of {category}" for category, count in dropped.items())
    return (f"Left out, longer than {settings.max_prompt_tokens} tokens: {counts}.",)


def _host(kernels: str, bit_exact: bool) -> str:
    return f"Kernels {kernels}; this host is {'bit-exact' if bit_exact else 'not bit-exact: tokens may differ'}."


def rich_table(grid: Grid) -> Table:
    """The grid for a terminal."""
    table = Table(title=grid.title, caption="\n".join(grid.notes), caption_justify="left")
    for column in grid.columns:
        table.add_column(column)
    for row, ends in zip(grid.rows, grid.ends_block, strict=True):
        table.add_row(*row, end_section=ends)
    return table


def markdown(grid: Grid) -> str:
    """The grid for a page of docs/."""
    lines = [f"**{grid.title}**", "", _line(grid.columns), _line(["---"] * len(grid.columns))]
    lines += [_line(row) for row in grid.rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in grid.notes), ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
