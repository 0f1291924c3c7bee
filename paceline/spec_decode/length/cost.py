"""Seconds of a target step and of drafting: measured at start, refined by every round (algorithms.md I1, I2).

Both are grids of measured points with bilinear interpolation between them: a target step over (batch, rows per
sequence), a draft over (batch, depth). That form is exact for ``a + b * batch + c * rows`` and follows the bend at the
ridge to within a cell. Times never fall when batch or rows grow: noise that says otherwise is averaged away (isotonic
regression, Barlow et al. 1972), so that a chooser of draft lengths never sees rows that cost less than nothing.

Online, a grid is ``scale * cells``: what slows everything (longer contexts, a busy host) moves the scale, and so also
cells that nobody visits; what is particular moves the cells around the visited point. No torch here.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

SCALE_RATE = 0.05  # EMA of the common factor
CELL_RATE = 0.05  # EMA of the cells around an observation
OUTLIER = 3.0  # an observation this many times off is refused ...
OUTLIERS_IN_A_ROW = 8  # ... until so many in a row say the same
ROW_SHARE = 0.035  # of a plain step, one further row: eight rows cost 1.25 steps; assumed where nothing is measured
DRAFT_SHARE = 0.05  # of a plain step, one draft step; assumed for a drafter that was never timed
COPY_SHARE = 0.001  # the same for one that only looks at the tokens
DRAFT_DEPTHS = (0, 1, 2, 4, 8, 16)
MAX_DRAFTERS = 32  # grids kept; a deployment has a handful


@dataclass(frozen=True)
class MeasureGrid:
    """Points to measure at start-up, each the best of ``repeats``, until ``limit_s`` are spent (then one run more)."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rows_per_seq: tuple[int, ...] = (1, 2, 4, 8, 16)
    repeats: int = 3
    limit_s: float = 5.0


class Grid:
    """Seconds over (batch, column), never falling in either.

    batches, columns: ascending. cells: seconds >= 0, [len(batches)][len(columns)]. ``assumed``: nothing was measured,
    so the first observation sets the scale alone.
    """

    def __init__(self, batches: Seq[int], columns: Seq[int], cells: Seq[Seq[float]], *, assumed: bool = False) -> None:
        self.batches, self.columns = tuple(batches), tuple(columns)
        self._cells = [list(row) for row in cells]
        self._scale = 1.0
        self._observed = 0 if assumed else round(1 / SCALE_RATE)
        self._refused = 0
        make_monotone(self._cells)

    def at(self, batch: float, column: float) -> float:
        """Seconds. Outside: the nearest batch's row; the first column; the last columns' slope onwards."""
        low, high, part = _between(self.batches, batch)
        near, far = self._row_at(low, column), self._row_at(high, column)
        return self._scale * (near + part * (far - near))

    def observe(self, batch: float, column: float, seconds: float) -> bool:
        """Take one measurement in; False when it was refused as an outlier."""
        expected = self.at(batch, column)
        if seconds <= 0.0 or expected <= 0.0:
            return False
        ratio = seconds / expected
        first = self._observed == 0
        if not first and not 1 / OUTLIER <= ratio <= OUTLIER:
            self._refused += 1
            if self._refused < OUTLIERS_IN_A_ROW:
                return False
            ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        else:
            self._refused = 0
        self._observed += 1
        self._scale *= 1 + max(SCALE_RATE, 1 / self._observed) * (ratio - 1)
        if not first:
            self._nudge(batch, column, ratio)
        return True

    def _nudge(self, batch: float, column: float, ratio: float) -> None:
        row, next_row, row_part = _between(self.batches, batch)
        left, right, part = _between(self.columns, column)
        for i, in_row in ((row, 1 - row_part), (next_row, row_part)):
            for j, in_column in ((left, 1 - part), (right, part)):
                self._cells[i][j] *= 1 + CELL_RATE * in_row * in_column * (ratio - 1)
        make_monotone(self._cells)

    def _row_at(self, row: int, column: float) -> float:
        cells, columns = self._cells[row], self.columns
        if column > columns[-1] and len(columns) > 1:
            slope = max(self._end_slope(i) for i in range(row + 1))  # more sequences never make a row cheaper
            return cells[-1] + slope * (column - columns[-1])
        left, right, part = _between(columns, column)
        return cells[left] + part * (cells[right] - cells[left])

    def _end_slope(self, row: int) -> float:
        """Seconds per column past the last; the mean slope guards against an end that noise made flat."""
        cells, columns = self._cells[row], self.columns
        last = (cells[-1] - cells[-2]) / (columns[-1] - columns[-2])
        return max(last, (cells[-1] - cells[0]) / (columns[-1] - columns[0]))


class CostTable:
    """What rounds cost on this node. ``rows`` always counts the rows of one target forward over the whole batch."""

    def __init__(self, target: Grid, drafts: Mapping[str, Grid] | None = None) -> None:
        self.target = target  # may be replaced by a measured one; what is assumed of drafters follows it
        self._drafts = dict(drafts or {})
        self._shares: dict[str, float] = {}  # of a plain step, one draft step; until the drafter is timed

    @classmethod
    def measure(
        cls,
        run: Callable[[int, int], float],
        grid: MeasureGrid = MeasureGrid(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> CostTable:
        """``run(batch, rows)`` does one target step of ``rows`` rows over ``batch`` sequences and returns its seconds.

        Few rows come first; points past the time limit are set by a line through the others.
        """
        return cls(_measure(run, grid.batches, grid.rows_per_seq, grid, clock))

    @classmethod
    def assumed(cls, step_s: float, row_s: float | None = None, grid: MeasureGrid = MeasureGrid()) -> CostTable:
        """A table of ``step_s`` plus ``row_s`` for each row past the first, for a node that measured nothing."""
        per_row = ROW_SHARE * step_s if row_s is None else row_s
        cells = [[step_s + per_row * (b * n - 1) for n in grid.rows_per_seq] for b in grid.batches]
        return cls(Grid(grid.batches, grid.rows_per_seq, cells, assumed=True))

    def measure_draft(
        self,
        drafter: str,
        run: Callable[[int, int], float],
        grid: MeasureGrid = MeasureGrid(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``run(batch, depth)`` drafts once and returns its seconds; the grid's columns are depths."""

        def timed(batch: int, units: int) -> float:
            return run(batch, units // batch)

        found = _measure(timed, grid.batches, grid.rows_per_seq, grid, clock)
        cells = [[0.0, *(found.at(b, d) for d in found.columns)] for b in found.batches]
        self._keep(drafter, Grid(found.batches, (0, *found.columns), cells))

    def timed_drafts(self) -> dict[str, Grid]:
        """Grids of the drafters that were timed, columns their depths."""
        return dict(self._drafts)

    def take(self, target: Grid, drafts: Mapping[str, Grid]) -> None:
        """Go on from what was measured before."""
        self.target = target
        self._drafts = dict(drafts)

    def estimate(self, batch: int, rows: float) -> float:
        """Seconds of a target step of ``rows`` rows over ``batch`` sequences.

        Beyond the largest batch measured, the rows alone count (as if they belonged to that many sequences).
        """
        known = min(max(batch, 1), self.target.batches[-1])
        return self.target.at(known, rows / known)

    def observe(self, batch: int, rows: int, seconds: float) -> bool:
        """Refine ``estimate``; False when the measurement was refused as an outlier."""
        known = min(max(batch, 1), self.target.batches[-1])
        return self.target.observe(known, rows / known, seconds)

    def draft_seconds(self, drafter: str, batch: int, depth: float) -> float:
        """Seconds of drafting trees of ``depth`` for ``batch`` sequences together; 0 for none."""
        if batch <= 0 or depth <= 0:
            return 0.0
        grid = self._drafts.get(drafter)
        if grid is None:
            return self._shares.get(drafter, DRAFT_SHARE) * depth * self.estimate(batch, batch)
        return grid.at(batch, depth)

    def observe_draft(self, drafter: str, batch: int, depth: int, seconds: float) -> bool:
        """Refine ``draft_seconds``; False when the measurement was refused."""
        if batch <= 0 or depth <= 0:
            return False
        if drafter not in self._drafts:
            self._keep(drafter, self._assumed(self._shares.get(drafter, DRAFT_SHARE)))
        return self._drafts[drafter].observe(batch, depth, seconds)

    def assume_draft(self, drafter: str, share: float) -> None:
        """Until it is timed, one draft step of ``drafter`` takes ``share`` of a plain step."""
        self._shares[drafter] = share

    def _assumed(self, share: float) -> Grid:
        batches = self.target.batches
        cells = [[share * d * self.estimate(b, b) for d in DRAFT_DEPTHS] for b in batches]
        return Grid(batches, DRAFT_DEPTHS, cells, assumed=True)

    def _keep(self, drafter: str, grid: Grid) -> None:
        if drafter not in self._drafts and len(self._drafts) >= MAX_DRAFTERS:
            del self._drafts[next(iter(self._drafts))]
        self._drafts[drafter] = grid


def isotonic(values: Seq[float]) -> list[float]:
    """The nearest non-falling sequence in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # (sum, count)
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, size = pools.pop()
            total, count = total + before, count + size
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def make_monotone(cells: list[list[float]]) -> None:
    """Make ``cells`` never fall along either axis, in place; untouched when it does not."""
    for _ in range(8):
        if is_monotone(cells):
            return
        for i, row in enumerate(cells):
            cells[i] = isotonic(row)
        for j in range(len(cells[0])):
            for row, value in zip(cells, isotonic([row[j] for row in cells]), strict=True):
                row[j] = value
    for i, row in enumerate(cells):  # the alternation converges, but not always in eight turns
        for j in range(len(row)):
            row[j] = max(row[j], cells[i - 1][j] if i else 0.0, row[j - 1] if j else 0.0)


def is_monotone(cells: Seq[Seq[float]]) -> bool:
    """Whether cells never fall along rows and columns."""
    return all(a <= b for row in cells for a, b in pairwise(row)) and all(
        a <= b for row, below in pairwise(cells) for a, b in zip(row, below, strict=True)
    )


def _between(points: Seq[int], value: float) -> tuple[int, int, float]:
    """Indexes of the neighbours of ``value`` and how far it is from the first to the second, clamped to the ends."""
    if value <= points[0]:
        return 0, 0, 0.0
    if value >= points[-1]:
        return len(points) - 1, len(points) - 1, 0.0
    right = bisect_right(points, value)
    return right - 1, right, (value - points[right - 1]) / (points[right] - points[right - 1])


def _measure(
    run: Callable[[int, int], float],
    batches: Seq[int],
    columns: Seq[int],
    grid: MeasureGrid,
    clock: Callable[[], float],
) -> Grid:
    start = clock()
    found: dict[tuple[int, int], float] = {}
    for batch, column in sorted(((b, n) for b in batches for n in columns), key=lambda p: (p[0] * p[1], p[0])):
        for _ in range(grid.repeats):
            if found and clock() - start >= grid.limit_s:
                break
            seconds = run(batch, batch * column)
            found[batch, column] = min(seconds, found.get((batch, column), seconds))
    base, slope = _line([(b * n, s) for (b, n), s in found.items()])
    cells = [[found.get((b, n), base + slope * b * n) for n in columns] for b in batches]
    return Grid(batches, columns, cells)


def _line(points: Seq[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope >= 0 of seconds over rows in least squares; one point alone gets the assumed slope."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0.0:
        slope = ROW_SHARE * mean_y
    else:
        slope = max(0.0, sum((x - mean_x) * (y - mean_y) for x, y in points) / spread)
    return mean_y - slope * mean_x, slope
