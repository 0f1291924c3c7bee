"""Growth of draft trees: EAGLE-2, threshold and static, on tables of q (algorithms.md D3-D5)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
import torch

from paceline.errors import ConfigError
from paceline.spec_decode.trees.expand import ROOT, DraftPool, DynamicGrowth, Growth, StaticGrowth
from paceline.spec_decode.trees.static_trees import (
    EAGLE_TREE,
    MEDUSA_TREE,
    MEDUSA_TREE_8,
    best_choices,
    checked_choices,
    child_counts,
    comb_choices,
    fit,
    fitted_counts,
)

Table = Callable[[str], list[tuple[str, float]]]  # path -> candidates with q, best first

D5: Mapping[str, list[tuple[str, float]]] = {
    "": [("A", 0.6), ("B", 0.3)],
    "A": [("C", 0.7), ("D", 0.2)],
    "B": [("E", 0.5), ("F", 0.4)],
    "AC": [("G", 0.9), ("H", 0.05)],
    "AD": [("I", 0.6), ("J", 0.3)],
    "BE": [("K", 0.8), ("L", 0.1)],
    "BF": [("M", 0.5), ("N", 0.5)],
}


def path(pool: DraftPool, node: int) -> str:
    return "" if node == ROOT else path(pool, pool.parents[node]) + chr(pool.token_ids[node])


def grow(growth: Growth, table: Table) -> tuple[list[str], int]:
    """Paths of the tree in its order, and how many draft forwards' rows it took."""

    def add(node: int) -> None:
        found = table(path(growth.pool, node))
        growth.add(node, [ord(t) for t, _ in found], [math.log(q) if q > 0 else -math.inf for _, q in found])

    add(ROOT)
    rows = 0
    while level := growth.level():
        assert len({growth.pool.depths[node] for node in level}) == 1
        for node in level:
            add(node)
        rows += len(level)
    return [path(growth.pool, node) for node in growth.kept()], rows


def connected(paths: list[str]) -> bool:
    """Every parent comes before its children."""
    return all(p[:-1] == "" or p[:-1] in paths[:i] for i, p in enumerate(paths))


KEPT = {
    5: "A B AC BE ACG",
    6: "A B AC AD BE ACG",
    7: "A B AC AD BE BF ACG",
    8: "A B AC AD BE BF ACG BEK",
}


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("expand_above", [None, 0.1])
def test_vector_of_the_reference(keep: int, expand_above: float | None) -> None:
    kept, _ = grow(DynamicGrowth(3, 2, keep, expand_above), D5.__getitem__)
    assert sorted(kept) == sorted(KEPT[keep].split())
    assert connected(kept)


def test_pools_of_the_reference() -> None:
    """With room for everything the pool is D5's: ten nodes for EAGLE-2, four more for the threshold."""
    growth = DynamicGrowth(3, 2, 100)
    kept, rows = grow(growth, D5.__getitem__)
    assert kept == ["A", "B", "AC", "AD", "BE", "BF", "ACG", "ACH", "BEK", "BEL"]
    assert rows == 4  # two a level
    expected = [0.6, 0.3, 0.42, 0.12, 0.15, 0.12, 0.378, 0.021, 0.12, 0.015]
    assert [math.exp(v) for v in growth.pool.log_values] == pytest.approx(expected)
    wide = DynamicGrowth(3, 2, 100, expand_above=0.1)
    kept, rows = grow(wide, D5.__getitem__)
    assert set(kept) - {path(growth.pool, n) for n in growth.kept()} == {"ADI", "ADJ", "BFM", "BFN"}
    assert rows == 6
    assert grow(DynamicGrowth(3, 2, 100, expand_above=0.2), D5.__getitem__)[1] == 3  # A, B and AC


def eagle2(table: Table, depth: int, width: int, keep: int) -> list[str]:
    """D3 word for word: no node is spared its forward, everything is in the pool."""
    pool: list[tuple[str, float]] = []

    def order(entry: int) -> tuple[float, int, int]:
        return (-pool[entry][1], len(pool[entry][0]), entry)

    def add(parent: str, value: float) -> list[int]:
        for token, q in table(parent)[:width]:
            pool.append((parent + token, value + math.log(q)))
        return list(range(len(pool) - len(table(parent)[:width]), len(pool)))

    frontier = add("", 0.0)
    for _ in range(depth - 1):
        frontier = sorted(frontier, key=order)[:width]
        frontier = [new for node in frontier for new in add(*pool[node])]
    return [pool[i][0] for i in sorted(sorted(range(len(pool)), key=order)[:keep])]


def random_table(seed: int, values: list[float]) -> Table:
    def table(path: str) -> list[tuple[str, float]]:
        rng = random.Random(f"{seed}/{path}")
        return [(t, q) for t, q in zip("ABC", sorted(rng.choices(values, k=3), reverse=True), strict=True)]

    return table


@pytest.mark.parametrize("values", [[0.9, 0.6, 0.3, 0.1], [1.0, 0.5], [1.0]])
def test_sparing_hopeless_nodes_changes_nothing(values: list[float]) -> None:
    saved = 0
    for seed in range(40):
        table = random_table(seed, values)
        for keep in (1, 3, 7, 12):
            kept, rows = grow(DynamicGrowth(4, 3, keep), table)
            assert kept == eagle2(table, 4, 3, keep)
            assert connected(kept)
            saved += 9 - rows
    assert saved > 0


def test_threshold_bounds_its_forwards() -> None:
    """Every path is certain: without a bound the tree would be expanded in full."""
    for keep in (1, 4, 9):
        kept, rows = grow(DynamicGrowth(5, 3, keep, expand_above=0.01), random_table(0, [1.0]))
        assert len(kept) == keep
        assert rows <= keep
        assert connected(kept)


def test_threshold_counts_forwards_of_nodes_that_fell_out() -> None:
    """A, B, C are expanded while they are the best three; then A's line takes their places, and there is no room."""
    kept, rows = grow(
        DynamicGrowth(5, 3, 3, expand_above=0.1),
        lambda p: [("A", 1.0)] if p else [("A", 0.4), ("B", 0.3), ("C", 0.3)],
    )
    assert (kept, rows) == (["A", "B", "AA"], 3)


def test_ties_stay_connected_and_an_unstable_top_k_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: with q == 1.0 a child ties with its parent."""
    tables = [random_table(seed, [1.0, 1.0, 0.5]) for seed in range(30)]
    assert all(connected(grow(DynamicGrowth(4, 3, 5), table)[0]) for table in tables)

    def last_first(pool: DraftPool, count: int) -> list[int]:
        return sorted(sorted(range(len(pool)), key=lambda node: (-pool.log_values[node], -node))[:count])

    def topk(pool: DraftPool, count: int) -> list[int]:
        values = torch.tensor(pool.log_values)
        return sorted(values.topk(min(count, len(pool))).indices.tolist())

    monkeypatch.setattr(DraftPool, "best", last_first)
    assert not all(connected(grow(DynamicGrowth(4, 3, 5), table)[0]) for table in tables)
    monkeypatch.setattr(DraftPool, "best", topk)
    assert not all(connected(grow(DynamicGrowth(4, 3, 5), table)[0]) for table in tables)


def test_odd_values_do_not_break_a_tree() -> None:
    """Rounded above 1, zero and NaN: a child never outranks its parent, an impossible candidate is none."""
    pool = DraftPool()
    pool.add(ROOT, [1, 2], [math.log(0.5), math.log(0.4)])
    pool.add(0, [3, 4, 5], [1e-7, -math.inf, math.log(0.3)])
    pool.add(1, [6], [math.nan])
    assert pool.token_ids == [1, 2, 3]
    assert pool.log_values[2] == pool.log_values[0]
    assert pool.best(1) == [0]
    assert pool.best(0) == []


def test_static_growth_follows_its_choices() -> None:
    choices = ((0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0))
    kept, rows = grow(StaticGrowth(child_counts(choices)), lambda p: [(chr(ord("A") + i), 0.3) for i in range(3)])
    assert kept == ["A", "B", "AA", "AB", "BA", "AAA"]
    assert rows == 3  # A, B, AA: nodes without children cost no forward
    growth = StaticGrowth(child_counts(choices))
    growth.add(ROOT, [1, 2], [-0.1, -2.0], last=True)
    assert growth.level() == []
    assert growth.kept() == [0, 1]


def test_choices_are_checked_and_cut() -> None:
    for bad in ([(0, 0)], [(1,)], [(0,), (0,)], [()], [(0,), (0, 1)], [(-1,)]):
        with pytest.raises(ConfigError, match="static_tree"):
            checked_choices(bad)
    assert comb_choices(2, 3) == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2))
    assert comb_choices(3, 1) == ((0,), (0, 0), (0, 0, 0))
    assert comb_choices(0, 3) == ()
    assert fitted_counts((), 2, 2, 9) == {(): 2, (0,): 2}
    for depth, width, nodes in ((1, 3, 9), (4, 2, 6), (8, 9, 99), (3, 1, 2)):
        part = fit(EAGLE_TREE, depth, width, nodes)
        assert checked_choices(part) == part
        assert len(part) <= nodes
        assert max(map(len, part)) <= depth
        assert max(map(max, part)) < width


@pytest.mark.parametrize("nodes", [3, 7, 12])
def test_best_choices_are_the_best(nodes: int) -> None:
    """Against every node there is, by value."""
    rates = ((0.6, 0.25, 0.1), (0.5, 0.3, 0.05), (0.7, 0.1, 0.1))

    def value(choice: tuple[int, ...]) -> float:
        return math.prod(rates[d][r] for d, r in enumerate(choice))

    every = [
        (a, *rest) for a in range(3) for rest in [(), *((b, *c) for b in range(3) for c in [(), (0,), (1,), (2,)])]
    ]
    chosen = best_choices(rates, nodes)
    assert sum(map(value, chosen)) == pytest.approx(sum(sorted(map(value, every), reverse=True)[:nodes]))
    assert checked_choices(chosen) == chosen


def test_default_trees() -> None:
    assert (len(EAGLE_TREE), len(MEDUSA_TREE), len(MEDUSA_TREE_8)) == (24, 15, 7)
    assert max(map(len, MEDUSA_TREE)) <= 4
    assert checked_choices(EAGLE_TREE) == EAGLE_TREE
    assert checked_choices(MEDUSA_TREE_8) == MEDUSA_TREE_8
