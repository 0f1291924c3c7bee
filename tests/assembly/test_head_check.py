"""Heads of another target, or untrained ones, are noticed at start; good ones are left in peace."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly import build, head_check
from paceline.assembly.build import build_runner
from paceline.assembly.head_check import FLOOR, HeadReport, check_heads, judge, try_heads
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.layers.linear import Linear
from paceline.models.llama import LlamaModel
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.heads.mtp import MtpHead
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.tiny_model import primary_of, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

torch.set_num_threads(1)
PROMPTS = [list(tiny_request(index=i).prompt_token_ids) for i in range(3)]


@pytest.fixture(autouse=True)
def prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have no tokenizer."""
    monkeypatch.setattr(head_check, "tokenized", lambda folder: PROMPTS)


class TickingClock:
    """Every look at it takes a tick."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def untrained(drafter: str, folder: Path, **options: Any) -> ModelRunner:
    if drafter not in ("mtp", "ngram"):
        write_tiny_head(folder / drafter, drafter)
        options["drafter_path"] = str(folder / drafter)
    return tiny_runner(drafter=drafter, num_draft_tokens=3, **options)


def agreeing() -> ModelRunner:
    """An MTP module and a target that both go by their last token."""
    runner = tiny_runner("bf16", drafter="mtp")
    drafter = primary_of(runner)
    assert isinstance(drafter, FeatureDrafter)
    assert isinstance(runner.model, LlamaModel)
    head = drafter.head
    assert isinstance(head, MtpHead)
    for block in (*runner.model.layers, head.module.block):
        block.o_proj._packed.mul_(0.02)  # type: ignore[attr-defined]
        block.down_proj._packed.mul_(0.02)  # type: ignore[attr-defined]
    eye = torch.eye(runner.model.spec.hidden_size)
    head.module.eh_proj = Linear(torch.cat((eye, 0.1 * eye), dim=1).to(runner.dtype))
    runner.model.lm_head = Linear(runner.model.embedding.roll(1, 0) * 0.25, out_float32=True)
    return runner


@pytest.mark.parametrize("drafter", ["mtp", "eagle", "eagle3", "medusa", "draft_model"])
def test_heads_of_another_target_are_warned_about(
    drafter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = untrained(drafter, tmp_path)
    report = check_heads(runner, tmp_path)
    assert report is not None
    assert report.first_acceptance < FLOOR
    (warning,) = [r.message for r in caplog.records if r.name == head_check.__name__]
    for part in (drafter, f"{report.first_acceptance:.3f}", "0.10", "revision", "auxiliary layers"):
        assert part in warning


def test_heads_that_fit_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner, clock = agreeing(), TickingClock()
    report = judge("mtp", try_heads(runner, PROMPTS, limit_s=1000.0, clock=clock))
    assert report is not None
    assert report.first_acceptance > 0.5
    assert report.round_steps == 1.0  # every round takes one tick
    assert report.speedup == report.tokens_per_round > 1.5
    assert [r.levelname for r in caplog.records if r.name == head_check.__name__] == ["INFO"]


def test_a_draft_model_that_is_the_target_is_always_accepted(tmp_path: Path) -> None:
    write_tiny_head(tmp_path / "model", "draft_model")
    values = {"model": str(tmp_path / "model"), "drafter": "draft_model", "drafter_path": str(tmp_path / "model")}
    runner = build_runner(NodeConfig.model_validate(values | {"dtype": "fp32", "kv_cache_tokens": 1024}))
    report = try_heads(runner, PROMPTS)
    assert report is not None
    assert report.first_acceptance == 1.0


@pytest.mark.parametrize("options", [{}, {"adaptive": "goodput"}, {"tree": "dynamic"}, {"mtp_modules": 2}])
def test_nothing_is_left_behind(options: dict[str, Any], tmp_path: Path) -> None:
    runner = untrained("mtp", tmp_path, **options)
    policy = runner.policy
    assert check_heads(runner, tmp_path) is not None
    assert runner.policy is policy
    assert runner.allocator.check_integrity([]) == []
    assert runner.allocator.num_free == runner.allocator.num_pages
    assert runner.prefix is not None
    assert runner.prefix.num_pages == 0


def test_under_auto_the_heads_are_checked_and_no_copy(tmp_path: Path) -> None:
    write_tiny_head(tmp_path / "eagle", "eagle")
    runner = tiny_runner(drafter="auto", drafter_path=str(tmp_path / "eagle"))
    report = check_heads(runner, tmp_path)
    assert report is not None
    assert report.first_acceptance < FLOOR


@pytest.mark.parametrize("weighed", [False, True])
def test_heads_that_slow_the_host_are_told_of_and_auto_is_named(
    weighed: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafting takes nine plain steps, more than five tokens a round can be worth."""
    runner, clock = agreeing(), TickingClock()
    propose = runner.drafter.propose

    def slow(seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        if any(seq.request.speculation.drafter == "mtp" for seq in seqs):
            clock.now += 9.0
        return propose(seqs, budgets)

    monkeypatch.setattr(runner.drafter, "propose", slow)
    report = try_heads(runner, PROMPTS, limit_s=1000.0, clock=clock)
    assert report is not None
    assert report.round_steps == 10.0
    judge("mtp", report, weighed=weighed)
    warnings = [r.message for r in caplog.records if r.name == head_check.__name__ and r.levelname == "WARNING"]
    assert len(warnings) == (not weighed)
    for part in ("mtp", "--drafter auto", "10.00 plain steps", f"{report.tokens_per_round:.2f} tokens"):
        assert all(part in warning for warning in warnings)


def test_few_rounds_say_nothing_of_their_seconds(caplog: pytest.LogCaptureFixture) -> None:
    judge("mtp", HeadReport(0.5, 1.5, None))
    assert not [r for r in caplog.records if r.name == head_check.__name__ and r.levelname == "WARNING"]


def test_the_time_is_bounded_and_few_drafts_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = TickingClock()
    runner = untrained("mtp", tmp_path)
    assert try_heads(runner, PROMPTS, limit_s=3.0, clock=clock) is None
    assert clock() <= 8  # one round of each kind, whose times are taken before and after
    assert head_check.judge("mtp", None) is None
    assert not [r for r in caplog.records if r.name == head_check.__name__]


def test_no_room_is_no_error(tmp_path: Path) -> None:
    runner = untrained("mtp", tmp_path, kv_cache_tokens=112, max_model_len=64)
    assert check_heads(runner, tmp_path) is None
    assert runner.allocator.num_free == runner.allocator.num_pages


def test_nothing_to_check(tmp_path: Path) -> None:
    assert check_heads(untrained("ngram", tmp_path), tmp_path) is None
    assert check_heads(tiny_runner(drafter="mtp", num_draft_tokens=0), tmp_path) is None


@pytest.mark.parametrize(("on", "decodes"), [(True, True), (False, True), (True, False)])
def test_on_decode_nodes_unless_switched_off(
    on: bool, decodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_head(tmp_path / "model", "draft_model")
    called: list[Path] = []
    monkeypatch.setattr(build, "check_heads", lambda runner, folder, *, weighed: called.append(folder))
    values = {"model": str(tmp_path / "model"), "drafter": "mtp", "dtype": "fp32", "head_check": "on" if on else "off"}
    build_runner(NodeConfig.model_validate(values | {"kv_cache_tokens": 1024}), decodes=decodes)
    assert called == ([tmp_path / "model"] if on and decodes else [])
