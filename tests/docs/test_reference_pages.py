"""The generated pages say what the code says, in cells that fit a page, and name every label."""

from __future__ import annotations

import pytest

from cluster.routing.metrics import Metrics
from cluster.state.journal import journal_counters
from cluster.state.registry_types import NodeRecord
from paceline.results import HandoffBytes
from support import reference_pages

MOST = 200  # characters of a cell


@pytest.mark.parametrize("path", reference_pages.pages(), ids=lambda path: path.name)
def test_the_page_is_up_to_date(path: reference_pages.Path) -> None:
    assert path.read_text(encoding="utf-8") == reference_pages.pages()[path], "tests/support/reference_pages.py --write"


@pytest.mark.parametrize("path", reference_pages.pages(), ids=lambda path: path.name)
def test_cells_fit_a_page(path: reference_pages.Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [cell for row in rows for cell in row.split(" | ") if len(cell) > MOST] == []


def test_queries_ask_for_metrics_that_exist() -> None:
    rows = reference_pages.metrics_page()
    for _, query in reference_pages.QUERIES:
        for word in query.replace("(", " ").replace("{", " ").replace("[", " ").split():
            if word.startswith("paceline_"):
                name = word.removesuffix("_sum").removesuffix("_count")
                assert f"| `{name}` |" in rows, word


def test_help_texts_name_their_labels() -> None:
    metrics = Metrics()
    metrics.watch_nodes(lambda: [NodeRecord("decode-0", "decode", 1, "h:1", copies={"ngram": (1, 2)})])
    journal_counters(metrics.registry)[1].labels("full").inc()
    metrics.request_refused("Overloaded")
    metrics.prefix_hit("decode", 1, 1)
    metrics.retried("HandoffFailed")
    metrics.handed_off(HandoffBytes(1, 1, 1, 1), 0.1, 0.1)
    metrics.set_breakers({"decode-0": 0.0})
    labels = {
        (metric.documentation, label)
        for metric in metrics.registry.collect()
        for sample in metric.samples
        for label in sample.labels
        if label != "le"
    }
    assert {label for _, label in labels} >= {"status", "role", "error", "byte_class", "node", "drafter", "result"}
    assert [(text, label) for text, label in labels if label not in text.replace(":", " ").replace(",", " ")] == []
