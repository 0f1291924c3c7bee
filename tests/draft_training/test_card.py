"""The card of a head says what made it, in the form of the cards that ship."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draft_training.export import Seen, card
from draft_training.train import Progress
from tests.support import prose

SHIPPED = sorted((Path(__file__).parents[2] / "heads").glob("*/*/README.md"))
NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def made() -> str:
    """A card of 2 corpora and 3 positions."""
    last = {"accepted_per_position": [0.5, 0.25, 0.125], "acceptance_length": 1.65625}
    progress = Progress(step=1234, tokens=5_678_901, seconds=3600.0, history=[last])
    seen = Seen({"a.jsonl": 1000, "b.jsonl": 20}, 400, {"gsm8k": 0.3})
    return card("eagle3", "smollm2-135m-instruct", seen, progress)


def test_a_card_says_it_all() -> None:
    text = made()
    for part in (
        "1,000 training samples of `a.jsonl`",
        "30 % of the samples from `gsm8k`",
        "400 samples were held out",
    ):
        assert part in text
    assert "5,678,901 tokens in 1,234 steps and 60 minutes" in text
    assert "| accepted, given that all before were | 0.500 | 0.250 | 0.125 |" in text
    assert prose.size_faults(text) == []


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_cards_have_its_lines(path: Path) -> None:
    """But for numbers, names and how many corpora and positions there are."""

    def shape(text: str) -> set[str]:
        lines = (line for line in text.splitlines() if not line.startswith("|"))
        return {re.sub(r"`[^`]*`", "`name`", NUMBER.sub("0", line)) for line in lines if not line.startswith("# ")}

    known = shape(made()) | shape(made().replace("Trained on answers", "Trained on prompts and answers"))
    assert shape(path.read_text(encoding="utf-8")) <= known
