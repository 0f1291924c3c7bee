"""What one start measured serves the next, and what is damaged is measured anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.assembly import kept_figures
from paceline.assembly.head_check import HeadReport
from paceline.assembly.kept_figures import Figures, keep_figures, read_figures
from paceline.spec_decode.length.cost import Grid

FIGURES = Figures(
    Grid((1, 4), (1, 2, 8), [[1.0, 2.0, 3.0], [2.0, 3.0, 5.0]]),
    {"eagle3": Grid((1,), (0, 2), [[0.0, 0.5]])},
    HeadReport(0.5, 1.9, 1.2),
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def test_figures_come_back_as_they_were() -> None:
    assert read_figures("key") is None
    keep_figures("key", FIGURES)
    kept = read_figures("key")
    assert kept is not None
    assert kept.target is not None
    assert kept.heads == FIGURES.heads
    assert [kept.target.at(b, c) for b in (1, 2, 4) for c in (1, 5, 8)] == pytest.approx(
        [1, 2.5, 3, 4 / 3, 3, 11 / 3, 2, 4, 5]
    )
    assert kept.drafts["eagle3"].at(1, 2) == 0.5
    assert kept.drafts["eagle3"].columns == (0, 2)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        json.dumps({"target": {"batches": [1], "columns": [1, 2], "cells": [[1.0]]}, "drafts": {}, "heads": None}),
        json.dumps({"target": {"batches": [2, 1], "columns": [1], "cells": [[1.0], [1]]}, "drafts": {}, "heads": None}),
        json.dumps({"target": {"batches": [1], "columns": [1], "cells": [["x"]]}, "drafts": {}, "heads": None}),
        json.dumps({"target": None, "drafts": {}, "heads": {"speed": 1}}),
    ],
)
def test_damaged_figures_are_none(damage: str, tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "key.json").write_text(damage)
    assert read_figures("key") is None


def test_the_oldest_files_go(tmp_path: Path) -> None:
    for number in range(kept_figures.MOST_FILES + 3):
        keep_figures(f"{number:03d}", FIGURES)
        os.utime(tmp_path / "measured" / f"{number:03d}.json", (number, number))
    keep_figures("999", Figures(None, {}, None))  # nothing was measured, nothing goes
    assert {path.stem for path in (tmp_path / "measured").iterdir()} == {
        f"{number:03d}" for number in range(3, kept_figures.MOST_FILES + 3)
    }


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "measured").write_text("a file")
    keep_figures("key", FIGURES)
    assert read_figures("key") is None
