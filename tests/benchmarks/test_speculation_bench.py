"""The comparison of drafters over the tiny model: its numbers agree with each other, and it can say "not equal"."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import plots, tables
from benchmarks.common.decode_loop import TimedRunner
from benchmarks.jobs import Outputs
from benchmarks.speculation.bench import Report, compare
from benchmarks.speculation.prompts import Prompt
from benchmarks.speculation.stats import ALL, Summary, first_difference, speedup, speedup_interval
from paceline.engine.model_runner import ModelRunner, RoundResult
from paceline.errors import ConfigError
from paceline.spec_decode import sequence
from tests.support.benchmarks import SETTINGS
from tests.support.tiny_model import tiny_request, tiny_runner

PROMPTS = [Prompt(str(i), name, (str(i), "and then")) for i, name in enumerate(("qa", "qa", "stem", "coding"))]


def encode(turns: Sequence[str], answers: Sequence[str]) -> tuple[int, ...] | None:
    """A prompt of the tiny model's ids for a question's number; an answer adds its tokens."""
    tokens = [int(t) for answer in answers for t in answer.split()]
    return (*tiny_request(index=int(turns[0])).prompt_token_ids, *tokens)


def decode(token_ids: Sequence[int]) -> str:
    return " ".join(map(str, token_ids))


def runners() -> dict[str, ModelRunner]:
    return {name: tiny_runner(drafter=name, tree_width=1, prefix_cache=False) for name in ("none", "ngram")}


def run(given: dict[str, ModelRunner] | None = None, **settings: object) -> Report:
    asked = dataclasses.replace(SETTINGS, **settings)  # type: ignore[arg-type]
    return compare(PROMPTS, given or runners(), asked, encode, decode)


@pytest.fixture(scope="module")
def report() -> Report:
    return run()


def rows(report: Report, drafter: str) -> dict[str, Summary]:
    return {s.category: s for s in report.summaries if s.drafter == drafter}


def test_every_drafter_has_every_prompt(report: Report) -> None:
    assert [(r.case, r.drafter) for r in report.records] == [
        (f"{i}/0", name) for i in range(4) for name in ("none", "ngram")
    ]
    assert list(rows(report, "ngram")) == ["mt_bench", "qa", ALL]
    assert [s.prompts for s in rows(report, "ngram").values()] == [2, 2, 4]


def test_counts_agree(report: Report) -> None:
    for record in report.records:
        assert record.output_tokens == 1 + record.rounds + sum(record.accepted_per_round)
        assert sum(record.accepted_per_position) == sum(record.accepted_per_round)
        assert sum(record.drafted_per_position) == record.draft_tokens  # a chain
        assert 0 <= record.draft_s < record.decode_s
    accepted = sum(sum(r.accepted_per_round) for r in report.records if r.drafter == "ngram")
    assert accepted > 0  # otherwise the rest says nothing
    whole = rows(report, "ngram")[ALL]
    assert whole.tokens == whole.rounds + accepted
    assert whole.acceptance_length == pytest.approx(1 + sum(whole.accepted_per_position))
    assert whole.acceptance_length == pytest.approx(whole.tokens / whole.rounds)


def test_costs_explain_the_speedup(report: Report) -> None:
    for s in report.summaries:
        assert s.speedup == pytest.approx(s.acceptance_length / (s.draft_cost + s.verify_cost))
        assert s.speedup_low <= s.speedup * (1 + 1e-9)
        assert s.speedup_high >= s.speedup * (1 - 1e-9)
    for s in rows(report, "none").values():
        assert (s.acceptance_length, s.accepted_per_position) == (1.0, ())
        assert s.speedup == pytest.approx(1.0)


def test_tokens_are_equal_greedy_and_sampled(report: Report) -> None:
    for each in (report, run(temperature=1.0)):
        assert [s.unequal for s in each.summaries] == [0] * len(each.summaries)


def test_later_turns_follow_the_baselines_answer() -> None:
    given = runners()
    result = run(given, turns="all", max_tokens=12)
    second = [r for r in result.records if r.case.endswith("/1")]
    assert len(second) == 8
    for first, later in zip([r for r in result.records if r.case.endswith("/0")], second, strict=True):
        assert later.prompt_tokens == first.prompt_tokens + first.output_tokens
    for runner in given.values():
        assert runner.allocator.check_integrity() == []
        assert runner.allocator.num_free == runner.kv.num_pages


def test_a_drafter_that_changes_the_text_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    given = runners()
    broken = given["ngram"]
    honest = broken.decode
    changed: list[int] = []

    def decode_wrongly(seqs: Sequence[sequence.Sequence]) -> list[RoundResult]:
        results = honest(seqs)
        for seq, result in zip(seqs, results, strict=True):
            if result.round.num_draft_tokens and seq.request.request_id == "2/0" and not changed:
                changed.append(seq.num_output - 1)
                seq.token_ids[-1] = (seq.token_ids[-1] + 1) % broken.vocab_size
        return results

    monkeypatch.setattr(broken, "decode", decode_wrongly)
    result = run(given)
    found = {(r.drafter, r.case): r.first_difference for r in result.records if r.first_difference is not None}
    assert found == {("ngram", "2/0"): changed[0]}
    assert {name: s.unequal for name, s in rows(result, "ngram").items()} == {"mt_bench": 1, "qa": 0, ALL: 1}
    assert ["1/2" in row for row in tables.speculation_grid(result).rows].count(True) == 1


def test_prompts_that_do_not_fit_are_counted() -> None:
    def short(turns: Sequence[str], answers: Sequence[str]) -> tuple[int, ...] | None:
        return None if turns[0] == "1" else encode(turns, answers)

    result = compare(PROMPTS, runners(), SETTINGS, short, decode, dropped={"rag": 2})
    assert result.dropped == {"rag": 2, "qa": 1}
    with pytest.raises(ConfigError, match="every prompt is longer"):
        compare(PROMPTS, runners(), SETTINGS, lambda turns, answers: None, decode)


def test_the_baseline_must_be_there() -> None:
    with pytest.raises(ConfigError, match="none must be among them"):
        run({"ngram": tiny_runner(drafter="ngram", prefix_cache=False)})


def test_a_method_that_calls_another_is_timed_once() -> None:
    class Clock(TimedRunner):
        time = 0.0

        def now(self) -> float:
            return self.time

    runner = tiny_runner(drafter="none")
    clock: list[Clock] = []

    def extend(items: object) -> None:
        clock[0].time += 1.0

    def propose(seqs: object, budgets: object) -> None:
        clock[0].time += 2.0
        runner.drafter.extend([])

    vars(runner.drafter).update(extend=extend, propose=propose)
    clock.append(Clock("none", runner))
    runner.drafter.propose([], [])
    assert clock[0].draft_s == 3.0
    runner.drafter.extend([])
    assert clock[0].draft_s == 4.0


# Statistics -----------------------------------------------------------------------------------------------------------


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_speedup_is_by_totals() -> None:
    plain = [(100.0, 10.0), (100.0, 30.0)]
    ours = [(100.0, 5.0), (100.0, 15.0)]
    assert speedup(ours, plain) == pytest.approx(2.0)
    assert speedup([(200.0, 5.0), (200.0, 15.0)], plain) == pytest.approx(4.0)  # other lengths: per token
    assert speedup([(0.0, 0.0)], [(0.0, 0.0)]) == 0.0


def test_interval_of_known_data() -> None:
    plain = [(100.0, 10.0)] * 40
    assert speedup_interval([(100.0, 5.0)] * 40, plain) == pytest.approx((2.0, 2.0))  # nothing varies
    # Seconds are 4 or 6 with equal chance: their mean over 40 prompts has a standard error of 1 / sqrt(40), so the
    # speed-up 10 / mean lies within 10 / (5 +- 1.96 * 0.158) with 95 %.
    low, high = speedup_interval([(100.0, 4.0), (100.0, 6.0)] * 20, plain)
    assert (low, high) == pytest.approx((10 / 5.31, 10 / 4.69), abs=0.02)
    assert speedup_interval([(100.0, 4.0)], [(100.0, 8.0)]) == (2.0, 2.0)


def test_interval_pairs_prompts() -> None:
    plain = [(100.0, seconds) for seconds in (1.0, 50.0, 3.0, 20.0)]
    ours = [(tokens, seconds / 2) for tokens, seconds in plain]
    assert speedup_interval(ours, plain) == pytest.approx((2.0, 2.0))  # unpaired draws would spread widely


# Outputs --------------------------------------------------------------------------------------------------------------


def test_results_round_trip(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text(report.to_json())
    assert Report.read(path) == report
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no result of this benchmark"):
        Report.read(path)


def test_tables(report: Report) -> None:
    grid = tables.speculation_grid(dataclasses.replace(report, dropped={"qa": 3}))
    assert [row[:2] for row in grid.rows] == [(s.category, s.drafter) for s in report.summaries]
    assert grid.ends_block == (False, True) * 3
    assert "Left out, longer than 256 tokens: 3 of qa." in grid.notes
    lines = tables.markdown(grid).splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(grid.columns) + 1}
    assert sum(line.startswith("|") for line in lines) == 2 + len(grid.rows)


def outputs(report: Report, where: Outputs) -> str:
    console = Console(file=io.StringIO(), width=200)
    draw = lambda path: plots.plot_speculation(report, path)  # noqa: E731
    where.write(report.to_json(), tables.speculation_grid(report), draw, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_without_matplotlib(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match="needs matplotlib: pip install matplotlib"):
        Outputs(plot=tmp_path / "x.png").check()  # asked for: refused before the work
    printed = outputs(report, Outputs(json=tmp_path / "x.json", markdown=tmp_path / "x.md"))
    assert "no plot: needs matplotlib" in printed
    assert Report.read(tmp_path / "x.json") == report
    assert not (tmp_path / "x.png").exists()
    assert "| qa | ngram |" in (tmp_path / "x.md").read_text()


def test_plot_is_a_png(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    outputs(report, Outputs(json=tmp_path / "x.json"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
