"""How the rooms of a package import each other. A room is a child of the package: a folder with all in it, or a module.

Imports are those that import-linter sees, inside functions and for types alone too.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from grimp import ImportGraph, build_graph

Arrow = tuple[str, str]  # who imports, and what
MOST_IN_A_CIRCLE = 14  # rooms of which all orders are looked at


@dataclass(frozen=True)
class Rooms:
    """The rooms of one package, and who imports whom."""

    names: tuple[str, ...]
    arrows: frozenset[Arrow]

    def circles(self) -> list[tuple[str, ...]]:
        """Rooms that import each other, at once or by others; each such set once."""
        above = {name: self._reached(name) for name in self.names}
        sets = {tuple(b for b in self.names if b in above[a] and a in above[b]) for a in self.names}
        return sorted(one for one in sets if len(one) > 1)

    def num_back(self) -> int:
        """The fewest arrows without which there is no circle. ValueError for a circle of too many rooms."""
        return sum(self._fewest_back(circle) for circle in self.circles())

    def floors(self) -> list[tuple[str, ...]]:
        """Rooms by what they stand on, the lowest first: a room is above all that it imports. The rooms of a circle
        share a floor."""
        circle_of = {name: frozenset(circle) for circle in self.circles() for name in circle}
        circle_of |= {name: frozenset([name]) for name in self.names if name not in circle_of}

        @cache
        def floor(circle: frozenset[str]) -> int:
            below = {circle_of[b] for a, b in self.arrows if a in circle} - {circle}
            return 1 + max(map(floor, below), default=-1)

        floors = {name: floor(circle_of[name]) for name in self.names}
        return [
            tuple(name for name in self.names if floors[name] == i) for i in range(max(floors.values(), default=-1) + 1)
        ]

    def _reached(self, name: str) -> set[str]:
        found, next_ones = set[str](), [name]
        while next_ones:
            here = next_ones.pop()
            new = {b for a, b in self.arrows if a == here} - found
            found |= new
            next_ones += new
        return found

    def _fewest_back(self, circle: Sequence[str]) -> int:
        """Over all orders, by what the first rooms of an order cost together."""
        if len(circle) > MOST_IN_A_CIRCLE:
            raise ValueError(f"{len(circle)} rooms import each other: {', '.join(circle)}")
        imports = [sum(1 << i for i, b in enumerate(circle) if (a, b) in self.arrows) for a in circle]
        fewest = [0] * (1 << len(circle))
        for placed in range(1, len(fewest)):
            last = [i for i in range(len(circle)) if placed >> i & 1]
            fewest[placed] = min(fewest[placed ^ 1 << i] + (imports[i] & ~placed).bit_count() for i in last)
        return fewest[-1]


def read_graph(root: Path, packages: Sequence[str]) -> ImportGraph:
    """The imports of a tree's packages; nothing of them runs."""
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        return build_graph(*packages, cache_dir=None)
    finally:
        sys.path.remove(str(root))


def rooms_of(graph: ImportGraph, package: str) -> Rooms:
    """The rooms of a package."""
    return _rooms(graph, {child: {child, *graph.find_descendants(child)} for child in graph.find_children(package)})


def packages_as_rooms(graph: ImportGraph, packages: Sequence[str]) -> Rooms:
    """Whole packages, each as a room."""
    return _rooms(graph, {name: {name, *graph.find_descendants(name)} for name in packages})


def _rooms(graph: ImportGraph, inside: dict[str, set[str]]) -> Rooms:
    room_of = {module: room for room, modules in inside.items() for module in modules}
    arrows = {
        (room, room_of[imported])
        for module, room in room_of.items()
        for imported in graph.find_modules_directly_imported_by(module)
        if room_of.get(imported, room) != room
    }
    return Rooms(tuple(sorted(inside)), frozenset(arrows))
