"""The batch sweep over the tiny model, its bound, and the crossover of known curves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plots, tables
from benchmarks.speculation import drafter_specs
from benchmarks.speculation.drafter_specs import DraftRun, Target, parse_drafters
from benchmarks.speculation.sweep import (
    ADAPTIVE_FLOOR,
    MIN_REQUESTS,
    SweepReport,
    crossover,
    filled,
    held_to,
    num_requests,
    sweep,
)
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.errors import ConfigError
from tests.support.benchmarks import SETTINGS
from tests.support.tiny_model import tiny_request, tiny_runner

REQUESTS = [tiny_request(index=i, max_tokens=10 + i % 3) for i in range(14)]
built: list[tuple[str, int, ModelRunner]] = []


def build(run: DraftRun, batch: int) -> ModelRunner:
    runner = tiny_runner(drafter=run.drafter, prefix_cache=False)
    built.append((run.label, batch, runner))
    return runner


@pytest.fixture(scope="module")
def report() -> SweepReport:
    built.clear()
    return sweep(parse_drafters("none,ngram"), [1, 4, 8], REQUESTS, build, SETTINGS)


def test_points(report: SweepReport) -> None:
    assert [(p.batch, p.drafter) for p in report.points] == [(b, d) for b in (1, 4, 8) for d in ("none", "ngram")]
    for p in report.points:
        requests = filled(REQUESTS, p.batch)
        assert p.requests == len(requests) == num_requests(p.batch)
        every = sum(r.params.max_tokens - 1 for r in requests)  # prefill gives the first of each
        assert p.tokens == every if p.batch == 1 else every / 3 < p.tokens < every  # the last ones leave places empty
        assert p.unequal == 0
        assert p.tokens_per_s == pytest.approx(p.tokens / p.decode_s)
        assert p.tokens / p.acceptance_length / p.rounds == pytest.approx(p.batch)
        assert p.to_best is None
    plain = [p for p in report.points if p.drafter == "none"]
    assert [p.acceptance_length for p in plain] == [1.0] * 3
    assert [p.speedup for p in plain] == pytest.approx([1.0] * 3)
    assert all(p.acceptance_length > 1 for p in report.points if p.drafter == "ngram")
    assert report.prompts_repeat  # 16 requests of 14 prompts
    assert list(report.crossovers) == ["ngram"]


def test_every_point_has_runners_of_its_own_and_gives_all_pages_back(report: SweepReport) -> None:
    assert [(label, batch) for label, batch, _ in built] == [(p.drafter, p.batch) for p in report.points]
    assert len({id(runner) for *_, runner in built}) == len(built)
    for *_, runner in built:
        assert runner.allocator.check_integrity() == []
        assert runner.allocator.num_free == runner.kv.num_pages


def test_requests_of_a_point() -> None:
    assert len(filled(REQUESTS[:5], 1)) == MIN_REQUESTS
    assert filled(REQUESTS[:5], 1)[5] == REQUESTS[0]
    assert len(filled(REQUESTS, 32)) == 64


def test_results_round_trip(report: SweepReport, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(report.to_json())
    assert SweepReport.read(tmp_path / "out.json") == report


def test_an_adaptive_run_is_held_to_the_best(report: SweepReport) -> None:
    assert report.holds  # no adaptive run, nothing to hold
    first, second, *_ = report.points
    for to_best, holds in ((ADAPTIVE_FLOOR, True), (ADAPTIVE_FLOOR - 0.001, False)):
        points = (first, dataclasses.replace(second, to_best=to_best))
        changed = dataclasses.replace(report, points=points)
        assert changed.holds is holds
        assert ("MISSED" in tables.sweep_grid(changed).rows[1][-1]) is not holds


@pytest.mark.parametrize(
    ("item", "drafter", "tokens"), [("default", "auto", 8), ("auto", "auto", 8), ("mtp", "mtp", 4)]
)
def test_default_and_auto_are_those_of_a_deployment(
    item: str, drafter: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: K is what a drafter without a length of its own has."""
    configs: list[NodeConfig] = []
    monkeypatch.setattr(drafter_specs, "assemble", lambda config, *rest: configs.append(config))
    model: Any = None
    target = Target("smollm2-135m-instruct", "bf16", "cpu", 1, model, RunnerIdentity("tiny", "", ""))
    target.runner(parse_drafters(item)[-1], batch=2, sequence_tokens=400, measured=False)
    assert [(c.drafter, c.num_draft_tokens, c.kv_cache_tokens > 800) for c in configs] == [(drafter, tokens, True)]


def test_what_an_adaptive_run_is_held_to() -> None:
    runs = parse_drafters("none,ngram:k=2,ngram:k=8,mtp,ngram:adaptive=window,auto:k=8,default")
    assert [run.adaptive for run in runs] == [False] * 4 + [True] * 3
    assert held_to(runs[4], runs) == ["none", "ngram:k=2", "ngram:k=8"]
    for chooses in runs[5:]:
        assert set(held_to(chooses, runs)) == {"none", "ngram:k=2", "ngram:k=8", "mtp"}


def test_an_adaptive_point_is_divided_by_the_best_fixed() -> None:
    runs = parse_drafters("none,ngram,ngram:adaptive=window")
    points = {p.drafter: p for p in sweep(runs, [2], REQUESTS[:12], build, SETTINGS).points}
    best = max(points["none"].tokens_per_s, points["ngram"].tokens_per_s)
    adaptive = points["ngram:adaptive=window"]
    assert adaptive.to_best == pytest.approx(adaptive.tokens_per_s / best)


def test_nothing_to_run() -> None:
    with pytest.raises(ConfigError, match="every prompt is longer"):
        sweep(parse_drafters("none"), [1], [], build, SETTINGS)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(1, 2.0), (2, 1.5), (4, 1.0)], None),
        ([(1, 0.9), (2, 0.8)], 1.0),
        ([(1, 2.0), (4, 0.0)], 2.0),  # halfway in the logarithm
        ([(1, 2.0), (8, 1.2), (16, 0.8), (32, 0.7)], 8 * 2**0.5),
        ([(1, 2.0), (2, 0.9), (4, 1.1), (8, 0.9)], 4 * 2**0.5),  # for good, not for once
        ([(1, 0.9), (2, 1.1)], None),
        ([], None),
    ],
)
def test_crossover(curve: list[tuple[int, float]], expected: float | None) -> None:
    assert crossover(curve) == (None if expected is None else pytest.approx(expected))


def test_plot_is_a_png(report: SweepReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    plots.plot_sweep(dataclasses.replace(report, crossovers={"ngram": 2.5}), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
