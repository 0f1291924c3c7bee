"""The generated pages say what the code says, in cells that fit a page; everything on them has a description."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.routing.metrics import Metrics
from cluster.state.journal import journal_counters
from cluster.state.registry_types import NodeRecord
from paceline import client
from paceline.results import HandoffBytes
from tests.support import reference_pages
from tests.support.reference import comments, grpc, http, markdown, metrics

MOST = 200  # characters of a cell
PAGES = reference_pages.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_page_is_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run `make proto`"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_cells_fit_a_page(path: Path) -> None:
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert len(rows) > 20
    assert [cell for row in rows for cell in re.split(r" \| ", row) if len(cell) > MOST] == []


def test_queries_ask_for_metrics_that_exist() -> None:
    rows = metrics.metrics_page()
    for _, query in metrics.QUERIES:
        for word in query.replace("(", " ").replace("{", " ").replace("[", " ").split():
            if word.startswith("paceline_"):
                name = word.removesuffix("_sum").removesuffix("_count")
                assert f"| `{name}` |" in rows, word


def test_help_texts_name_their_labels() -> None:
    made = Metrics()
    made.watch_nodes(lambda: [NodeRecord("decode-0", "decode", 1, "h:1", copies={"ngram": (1, 2)})])
    journal_counters(made.registry)[1].labels("full").inc()
    made.request_refused("Overloaded")
    made.prefix_hit("decode", 1, 1)
    made.retried("HandoffFailed")
    made.handed_off(HandoffBytes(1, 1, 1, 1), 0.1, 0.1)
    made.set_breakers({"decode-0": 0.0})
    labels = {
        (metric.documentation, label)
        for metric in made.registry.collect()
        for sample in metric.samples
        for label in sample.labels
        if label != "le"
    }
    assert {label for _, label in labels} >= {"status", "role", "error", "byte_class", "node", "drafter", "result"}
    assert [(text, label) for text, label in labels if label not in text.replace(":", " ").replace(",", " ")] == []


def undescribed(document: dict[str, Any]) -> Iterator[str]:
    """Operations, answers and fields of an OpenAPI document without a description."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if not operation.get("description"):
                yield f"{method} {path}"
            yield from (f"{path} {status}" for status, one in operation["responses"].items() if not one["description"])
    for name, schema in document["components"]["schemas"].items():
        for field, found in schema["properties"].items():
            if not found.get("description") and not comments.field_comments(name).get(field):
                yield f"{name}.{field}"


def test_every_http_operation_and_field_is_described() -> None:
    document = http.document()
    assert list(undescribed(document)) == []
    del document["paths"]["/health"]["get"]["description"]
    del document["components"]["schemas"]["ChatRequest"]["properties"]["seed"]["description"]
    assert list(undescribed(document)) == ["get /health", "ChatRequest.seed"]


def test_everything_in_proto_has_a_comment() -> None:
    found = grpc.entries()
    assert {"inference.Inference.Generate", "inference.GenerateRequest.prompt", "common.FinishReason"} <= {
        entry.path for entry in found
    }
    assert [entry.path for entry in found if not entry.comment] == []


def test_the_sdk_page_names_everything_public() -> None:
    page = PAGES[reference_pages.ROOT / "docs/api/python.md"]
    headings = set(re.findall(r"^###+ (.+)$", page, re.MULTILINE)) | set(
        re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    )
    assert set(client.__all__) - headings == set()
    assert {"Client.generate", "AsyncClient.trace", "ChunkStream.close"} <= headings


def test_every_field_of_a_result_has_a_comment() -> None:
    kinds = [kind for name in client.__all__ if dataclasses.is_dataclass(kind := getattr(client, name))]
    assert len(kinds) > 10
    missing = [
        f"{kind.__name__}.{field.name}"  # type: ignore[union-attr]
        for kind in kinds
        for field in dataclasses.fields(kind)
        if not comments.comments_of(kind).get(field.name)  # type: ignore[arg-type]
    ]
    assert missing == []


def test_docstrings_become_markdown() -> None:
    def documented() -> None:
        """What it does, with ``code``.

        name: what it is,
        on two lines.
        one, other: both.

            x = 1

            y = 2

        The end.
        """

    assert markdown.paragraphs(documented.__doc__) == [
        "What it does, with `code`.",
        "- `name`: what it is,\n  on two lines.\n- `one`, `other`: both.",
        "```python\nx = 1\n\ny = 2\n```",
        "The end.",
    ]
