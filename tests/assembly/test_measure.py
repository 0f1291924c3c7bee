"""Step costs measured at start: on the real forward, with pages that all come back, and only where they are weighed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly import build, measure
from paceline.assembly.build import ASSUMED_STEP_S, build_runner
from paceline.assembly.measure import DIGESTED, PROMPT_TOKENS, measure_costs
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import ExtendItem
from paceline.spec_decode.length.cost import CostTable, Grid, MeasureGrid
from tests.support.exactness import run
from tests.support.tiny_model import tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

torch.set_num_threads(1)
QUICK = MeasureGrid(repeats=1, limit_s=2.0)
TICK_S = ASSUMED_STEP_S / 50


class TickingClock:
    """A step takes one tick, however busy the machine is."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def perf_counter(self) -> float:
        return next(self._ticks) * TICK_S


def costs_of(runner: ModelRunner) -> CostTable:
    assert runner.policy.costs is not None
    return runner.policy.costs


def make(drafter: str, folder: Path, **options: Any) -> ModelRunner:
    if drafter in ("eagle", "eagle3", "medusa", "draft_model"):
        write_tiny_head(folder / drafter, drafter)
        options["drafter_path"] = str(folder / drafter)
    return tiny_runner(drafter=drafter, num_draft_tokens=3, **options)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("ngram", {}),
        ("mtp", {}),
        ("mtp", {"mtp_modules": 2}),
        ("eagle", {"tree": "dynamic", "tree_width": 3}),
        ("eagle3", {"tree": "static"}),
        ("medusa", {}),
        ("draft_model", {}),
        ("auto", {}),
    ],
)
def test_the_table_is_measured_and_every_page_comes_back(
    drafter: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "time", TickingClock())
    runner = make(drafter, tmp_path, adaptive="goodput", **options)
    costs, name = costs_of(runner), runner.drafter.name
    measure_costs(runner, 4, QUICK)
    assert costs.target.batches == (1, 2, 4)
    assert costs.estimate(1, 1) == pytest.approx(TICK_S)  # not what was assumed
    assert costs.estimate(4, 32) >= costs.estimate(1, 1)
    assert (name in costs._drafts) == (name != "ngram")
    assert runner.allocator.check_integrity([]) == []
    assert runner.allocator.num_free == runner.allocator.num_pages
    assert runner.prefix is not None
    assert runner.prefix.num_pages == 0


def test_drafting_is_timed_with_the_rows_that_it_digests_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runner = make("mtp", tmp_path, adaptive="goodput")
    digested: list[tuple[int, int]] = []
    extend = runner.drafter.extend

    def slow(items: Seq[ExtendItem]) -> None:
        if all(item.end - item.start == DIGESTED for item in items):  # not the prompts
            digested.extend((item.start, item.end) for item in items)
            time.sleep(0.05)
        extend(items)

    monkeypatch.setattr(runner.drafter, "extend", slow)
    measure_costs(runner, 1, QUICK)
    assert set(digested) == {(PROMPT_TOKENS - DIGESTED, PROMPT_TOKENS)}
    assert costs_of(runner).draft_seconds("mtp", 1, 1) > 0.05


def test_the_choosers_look_at_the_measured_table() -> None:
    """Drafters that were assumed at the start follow the target's measured step."""
    runner = tiny_runner(drafter="auto", adaptive="goodput")
    costs = costs_of(runner)
    before = costs.draft_seconds("suffix", 1, 4)
    costs.target = Grid((1, 2), (1, 2), [[ASSUMED_STEP_S / 10] * 2] * 2)
    assert costs.draft_seconds("suffix", 1, 4) == pytest.approx(before / 10)


@pytest.mark.parametrize("options", [{"drafter": "mtp", "adaptive": "goodput"}, {"drafter": "auto"}])
def test_text_is_what_it_was(options: dict[str, Any]) -> None:
    requests = [tiny_request(index=i, temperature=float(i % 2)) for i in range(4)]
    plain = run(tiny_runner("bf16", drafter="none"), requests, batch=2)
    runner = tiny_runner("bf16", **options)
    measure_costs(runner, 4, QUICK)
    for _ in range(2):
        for got, expected in zip(run(runner, requests, batch=2), plain, strict=True):
            assert (got.token_ids, got.logit_bits) == (expected.token_ids, expected.logit_bits)


def test_a_small_pool_bounds_the_batches_and_a_tiny_one_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner = tiny_runner(drafter="ngram", adaptive="goodput", kv_cache_tokens=112, max_model_len=64)
    measure_costs(runner, 32, QUICK)
    assert costs_of(runner).target.batches == (1, 2)
    held = runner.allocator.allocate(runner.allocator.num_free - 1)
    target = costs_of(runner).target
    measure_costs(runner, 32, QUICK)
    assert costs_of(runner).target is target
    assert "too small" in caplog.text
    runner.allocator.release(held)


def test_an_error_gives_the_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(drafter="mtp", adaptive="goodput")

    def broken(*_: object) -> None:
        raise RuntimeError("no draft")

    monkeypatch.setattr(runner.drafter, "propose", broken)
    with pytest.raises(RuntimeError, match="no draft"):
        measure_costs(runner, 2, QUICK)
    assert runner.allocator.num_free == runner.allocator.num_pages


@pytest.mark.parametrize(
    ("options", "decodes", "measured"),
    [
        ({"adaptive": "goodput"}, True, True),
        ({"drafter": "auto"}, True, True),
        ({"adaptive": "goodput"}, False, False),
        ({"adaptive": "window"}, True, False),
        ({}, True, False),
    ],
)
def test_only_nodes_that_weigh_costs_pay(
    options: dict[str, str], decodes: bool, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node warms its kernels, for steps of its own sizes. Mutant: a node that is built does not."""
    write_tiny_head(tmp_path / "model", "draft_model")  # a whole folder of a tiny Llama
    called: list[int] = []
    warmed: list[tuple[int, int, bool]] = []
    monkeypatch.setattr(build, "measure_costs", lambda runner, max_batch: called.append(max_batch))
    monkeypatch.setattr(build, "warm_kernels", lambda _, *sizes, decodes: warmed.append((*sizes, decodes)))
    values = {"model": str(tmp_path / "model"), "drafter": "ngram", "dtype": "fp32", "max_running": 7} | options
    build_runner(NodeConfig.model_validate(values | {"kv_cache_tokens": 1024}), decodes=decodes)
    assert called == ([7] if measured else [])
    assert warmed == [(256, 7, decodes)]
