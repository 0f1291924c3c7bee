"""Generate the pages of docs/ that come from the code; compare them with the committed ones, or ``--write`` them."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.reference.cli import cli_page
from tests.support.reference.configuration import configuration_page
from tests.support.reference.grpc import grpc_page
from tests.support.reference.http import http_page
from tests.support.reference.metrics import metrics_page
from tests.support.reference.python import python_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "api/cli.md": cli_page,
    "api/http.md": http_page,
    "api/grpc.md": grpc_page,
    "api/python.md": python_page,
}


def pages() -> dict[Path, str]:
    """Every generated page by its path."""
    return {ROOT / "docs" / name: make() for name, make in PAGES.items()}


def main() -> None:
    """See the module docstring."""
    made = pages()
    if "--write" in sys.argv:
        for path, text in made.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return
    stale = [
        path.relative_to(ROOT)
        for path, text in made.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if stale:
        again = "run `make proto` and commit the result"
        raise SystemExit(f"{', '.join(map(str, stale))}: not what the code says\n{again}")
    print(f"docs: {len(made)} generated pages match")


if __name__ == "__main__":
    main()
