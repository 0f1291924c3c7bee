"""The index of what tests share, in tests/README.md: a line for each module. ``--write`` brings it up to date."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = TESTS / "README.md"
FOLDERS = {
    "support": "Builders, drivers, checks and oracles",
    "fakes": "Stand-ins for parts of the product and for servers",
}


def first_paragraph(module: Path) -> str:
    """The first paragraph of the module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(module.read_text()))
    if text is None:
        raise ValueError(f"{module} has no docstring to list it by")
    return " ".join(text.split("\n\n")[0].split())


def index() -> str:
    """The tables of the README."""
    parts = []
    for folder, title in FOLDERS.items():
        modules = [one for one in sorted((TESTS / folder).rglob("*.py")) if one.name != "__init__.py"]
        rows = [f"| `{one.relative_to(TESTS)}` | {first_paragraph(one)} |" for one in modules]
        parts.append("\n".join([f"## {title}", "", "| module | what it gives |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def split() -> tuple[str, str]:
    """The README's text before the index, and its index."""
    text = README.read_text()
    at = text.index("## ")
    return text[:at], text[at:]


if __name__ == "__main__" and "--write" in sys.argv:
    README.write_text(split()[0] + index())
