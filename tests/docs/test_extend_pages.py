"""docs/extend: each page has a test that runs all of its code, and names only files that are there or that it adds."""

from __future__ import annotations

import re

import pytest

from tests.support.recipes import PAGES, code_of

ROOT = PAGES.parents[1]
RECIPES = {
    "drafter.md": "tests/assembly/test_add_a_drafter.py",
    "model.md": "tests/models/test_new_model.py",
    "transport.md": "tests/kv_transfer/transports/test_add_a_transport.py",
}
PATH = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.(?:py|md|json))`")


def test_every_page_has_a_recipe() -> None:
    assert {page.name for page in PAGES.glob("*.md")} == set(RECIPES)


@pytest.mark.parametrize("page", RECIPES)
def test_the_recipe_runs_every_block(page: str) -> None:
    recipe = (ROOT / RECIPES[page]).read_text(encoding="utf-8")
    files = code_of(page)
    assert len(files) == 3  # the part, its record, its tests
    assert [file for file in files if f'"{file}"' not in recipe] == []


@pytest.mark.parametrize("page", RECIPES)
def test_files_that_a_page_names_exist_or_are_added(page: str) -> None:
    named = set(PATH.findall((PAGES / page).read_text(encoding="utf-8")))
    assert len(named) > 5
    assert [file for file in sorted(named - set(code_of(page))) if not (ROOT / file).exists()] == []
