"""How much of a Lark grammar leads back to itself. An ambiguous grammar takes time by the square of it, at every token,
and nothing can interrupt the library meanwhile; the grammar of a programming language has some dozens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MAX_RECURSIVE = 100  # references between rules that lead back to themselves

_DEFINITION = re.compile(r"^[ \t]*[?!]?(?P<name>\w+)(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_NAME = re.compile(r"\b[a-z_]\w*")


def recursive_references(source: str) -> int:
    """source: a Lark grammar whose texts, regular expressions, schemas and comments are blank."""
    found = list(_DEFINITION.finditer(source))
    if source.count(":") != len(found) or len({f["name"] for f in found}) != len(found):
        return len(_NAME.findall(source))  # written in a way that is not read here: as if all of it led back
    ends = [*(after.start() for after in found[1:]), len(source)]
    rules = {f["name"]: _NAME.findall(source, f.end(), end) for f, end in zip(found, ends, strict=True)}
    part = _parts(rules)
    return sum(part.get(name) == part[rule] for rule, names in rules.items() for name in names)


def _parts(rules: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The strongly connected part of each rule (Kosaraju): rules of one part can be reached from one another."""
    back: dict[str, list[str]] = {name: [] for name in rules}
    for rule, names in rules.items():
        for name in set(names) & rules.keys():
            back[name].append(rule)
    order: list[str] = []
    seen: set[str] = set()
    for rule in rules:
        order += _reached(rule, rules, seen)
    part: dict[str, int] = {}
    seen = set()
    for number, rule in enumerate(reversed(order)):
        part |= dict.fromkeys(_reached(rule, back, seen), number)
    return part


def _reached(rule: str, edges: Mapping[str, Sequence[str]], seen: set[str]) -> list[str]:
    """What can be reached from ``rule`` and was not seen, each after all that it reaches."""
    if rule in seen:
        return []
    order: list[str] = []
    seen.add(rule)
    path = [(rule, iter(edges[rule]))]
    while path:
        here, names = path[-1]
        below = next((name for name in names if name in edges and name not in seen), None)
        if below is None:
            order.append(here)
            path.pop()
        else:
            seen.add(below)
            path.append((below, iter(edges[below])))
    return order
