"""The pictures of the documentation: all that a page shows are there, and the kept data still make them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.pictures import upgrade
from benchmarks.pictures.__main__ import DRAWN, write
from benchmarks.pictures.data import HANDOFF_TRACE, PICTURES, ROOT, UPGRADE
from benchmarks.pictures.handoff import read
from benchmarks.pictures.record_upgrade import UpgradeRun
from benchmarks.pictures.upgrade_load import Ended

SHOWN = re.compile(r"!\[(?P<told>[^\]]*)\]\((?P<file>[^)\s]+)\)|<img (?P<attributes>[^>]*)>")
TEXT = re.compile(r"<!-- (.+?) -->")  # matplotlib draws a text as shapes, and notes the text before them


@cache
def pages() -> tuple[Path, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return tuple(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())


def pictures_of(page: Path, text: str) -> list[tuple[str, Path]]:
    """Description and file of every local picture of a page."""
    found: list[tuple[str, str]] = []
    for match in SHOWN.finditer(text):
        given = dict(re.findall(r'(\w+)="([^"]*)"', match["attributes"] or ""))
        found.append((match["told"] or given.get("alt", ""), match["file"] or given.get("src", "")))
    return [(told, (page.parent / at).resolve()) for told, at in found if "://" not in at]


def test_every_picture_that_a_page_shows_is_there() -> None:
    shown = [(page, *each) for page in pages() for each in pictures_of(page, page.read_text(encoding="utf-8"))]
    assert shown
    assert [f"{page.name}: {file}" for page, _, file in shown if not file.is_file()] == []
    assert [f"{page.name}: {file} has no description" for page, told, file in shown if not told] == []


def test_pictures_are_found_in_both_spellings() -> None:
    text = '![path](pictures/a.svg) ![](https://a.example/b.svg) <img width="3" src="pictures/c.svg" alt="c c"> ![](d)'
    found = [(told, file.name) for told, file in pictures_of(ROOT / "docs" / "x.md", text)]
    assert found == [("path", "a.svg"), ("c c", "c.svg"), ("", "d")]


def test_the_kept_trace_is_one_whole_handed_over_request() -> None:
    timeline = read(HANDOFF_TRACE)
    assert timeline.other["silent_nodes"] == []
    assert timeline.other["dropped_events"] == 0
    assert timeline.other["made_by"]
    sent, received = timeline.named("chunk sent"), timeline.named("chunk received")
    assert sum(s.details["num_bytes"] for s in sent) == sum(s.details["num_bytes"] for s in received) > 0
    chunks = [span for span in timeline.named("chunk") if span.lane == 1]
    prompt = timeline.named("planned")[0].details["prompt_tokens"]
    assert chunks[-1].details["end_token"] == prompt
    assert timeline.moment("hand-off reserved") < chunks[0].start_ms < timeline.moment("first token")
    assert timeline.moment("first token") < timeline.moment("state sent") < timeline.moment("round")


def test_the_kept_upgrade_renewed_every_node_and_router_under_streams() -> None:
    """Mutant: failures are not told apart from ends."""
    run = UpgradeRun.read(UPGRADE)
    for parts in ("nodes", "routers"):
        before, after = ({name: one for name, (one, _) in getattr(run.seen[at], parts).items()} for at in (0, -1))
        assert after == {name: generation + 1 for name, generation in before.items()}
    for over in ("grpc", "http"):
        assert any(run.began_s < one.at_s < run.routers_s for one in run.ended if one.over == over)
        assert any(run.routers_s < one.at_s < run.ended_s for one in run.ended if one.over == over)
    assert upgrade.told(run).startswith("0 of ")
    failed = replace(run, ended=[*run.ended, Ended(1.0, "lost", 3, 9.0)])
    assert upgrade.told(failed) == f"1 of {len(run.ended) + 1} failed, longest pause 9.0 s"
    streams = upgrade.draw(failed).axes[0]
    assert [sum(bar.get_height() for bar in bars) for bars in streams.containers] == [len(run.ended), 1]


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn_from_the_kept_data_and_is_the_one_in_docs(name: str, tmp_path: Path) -> None:
    """Its texts, which hold the figures, are those of the committed file; drawn again it is the same file."""
    drawn = write(name, tmp_path).read_bytes()
    assert write(name, tmp_path).read_bytes() == drawn
    kept = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert TEXT.findall(drawn.decode()) == TEXT.findall(kept)
    assert len(TEXT.findall(kept)) > 5
    assert not re.search(r"<dc:date>|matplotlib v", kept, re.IGNORECASE)
