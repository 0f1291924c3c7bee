"""``paceline bench widths``: what its figures count, who is asked when, which ratios it holds; the peers' installer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.peers import install, openvino_worker
from benchmarks.peers.engines import Engine, Groups, Timing, gguf_types
from benchmarks.peers.width_goals import goal_grid, grid
from benchmarks.peers.widths import PROMPTS, Figures, Row, WidthsPlan, WidthsReport, figures, measure, together
from benchmarks.serving.workload import Ask
from paceline.errors import ConfigError
from tests.support.tiny_model import tiny_spec

BLANK = "-"


def asks(number: int, max_tokens: int) -> list[Ask]:
    return [Ask(i, 0.0, f"question {i}", 4, max_tokens, i) for i in range(number)]


PLAN = WidthsPlan(asks(1, 2), asks(2, 5), asks(2, 5), {128: asks(1, 2), 512: asks(1, 2)}, "kept texts")


def answers(step_s: float, groups: Groups) -> list[list[Timing]]:
    """A first token after ten steps, then one each step."""
    return [[Timing([step_s * (10 + i) for i in range(a.max_tokens)], a.max_tokens, 4) for a in g] for g in groups]


def test_streams_count_while_all_of_them_decode() -> None:
    """From 2 s, when the later stream begins, to 4 s, when the earlier one ends: 2 pieces of 2 tokens, and 2 of 1."""
    early = Timing([1.0, 2.0, 3.0, 4.0], 8, 4)
    late = Timing([2.0, 3.0, 4.0, 5.0, 6.0], 5, 4)
    assert together([early, late]) == pytest.approx(6 / 2.0)
    with pytest.raises(ConfigError, match="side by side"):
        together([early, Timing([4.0, 5.0], 2, 4)])


def test_figures_are_of_what_was_asked() -> None:
    """Nothing of the warm-up counts, nor the first time that streams run side by side."""
    timings = answers(0.01, PLAN.groups())
    slow = answers(1.0, PLAN.groups())
    told = figures(PLAN, [slow[0], *timings[1:3], slow[3], timings[4], timings[5], slow[6]])
    assert [told.alone, told.beside] == pytest.approx([100, 200])
    assert told.first_ms == pytest.approx({128: 100, 512: 10_000})


@pytest.mark.parametrize("wrong", [Timing([1.0, 2.0], 4, 4), Timing([1.0, 2.0], 5, 3)])
def test_another_length_than_was_asked_has_no_figures(wrong: Timing) -> None:
    timings = answers(0.01, PLAN.groups())
    timings[1] = [wrong]
    with pytest.raises(ConfigError, match=r"asked for 4 \+ 5 tokens"):
        figures(PLAN, timings)


def test_rounds_go_forwards_and_backwards_and_the_best_counts(tmp_path: Path) -> None:
    """What is missing, or fails, has a row that says why, and is not asked again."""
    seen: list[str] = []

    def engine(name: str, *needs: Path) -> Engine:
        def ask(groups: Groups) -> list[list[Timing]]:
            seen.append(name)
            if name == "fails":
                raise ConfigError("peers", "a request failed")
            return answers(0.01 * len(seen), groups)

        return Engine(name, "Q8_0", 8, needs, "llama.cpp", ask)

    chosen = [engine("a"), engine("fails"), engine("b"), engine("absent", tmp_path / "server")]
    a, fails, b, absent = measure(chosen, PLAN, 2, lambda done, total, now: None)
    assert seen == ["a", "fails", "b", "b", "a"]
    assert a.best is not None
    assert [len(a.rounds), a.best.alone, a.best.first_ms[128]] == pytest.approx([2, 100, 100])
    assert b.best is not None
    assert b.best.beside == pytest.approx(2 / 0.03)
    assert (fails.best, "a request failed" in fails.reason) == (None, True)
    assert absent.reason.endswith("run `python -m benchmarks.peers.install llama.cpp`")


def row(name: str, weights: str, bits: int, alone: float, beside: float = 100.0, first: float = 100.0) -> Row:
    return Row(name, weights, bits, [Figures(alone, beside, dict.fromkeys(PROMPTS, first))])


def test_ratios_hold_or_are_missed(tmp_path: Path) -> None:
    rows = [
        row("paceline", "bf16", 16, 90, beside=260, first=101),
        row("llama.cpp", "bf16", 16, 80),
        row("openvino", "bf16", 16, 70, beside=200),
        row("paceline", "w8a8", 8, 151, beside=259, first=90),
        row("llama.cpp", "Q8_0", 8, 100, beside=150),
        row("openvino", "int8", 8, 100, beside=150, first=80),
        row("openvino", "int8, f32", 8, 100, beside=200, first=90),
        row("paceline", "w4a8", 4, 139, beside=999),
        row("paceline", "Q4_1", 4, 120),
        row("llama.cpp", "Q4_0", 4, 100),
        row("llama.cpp", "Q4_1", 4, 100),
        Row("openvino", "int4", 4, [], "it is not there"),
    ]
    path = tmp_path / "widths.json"
    path.write_text(WidthsReport("m", 2, True, "kept texts", 64, 576, rows).to_json())
    report = WidthsReport.read(path)
    assert report.rows == rows
    verdicts = [(*cells[1:],) for cells in goal_grid(report).rows]
    assert verdicts == [
        (">= 1.5", "1.51", "holds"),
        (">= 1.4", "1.39", "MISSED"),
        (">= 1.2", "1.20", "holds"),
        (">= 1.3", "1.30", "holds"),
        (">= 1.3", "1.29", "MISSED"),  # beside the faster of both, and of OpenVINO's two
        *[(">= 1.3", BLANK, "not measured")] * 2,  # one of the two has no figures
        *[("<= 1", "1.01", "MISSED")] * 3,
        *[("<= 1", "1.12", "MISSED")] * 3,  # beside the sooner of OpenVINO's two
    ]
    table = grid(report)
    assert table.rows[-1] == ("openvino", "int4", *[BLANK] * 5)
    assert any(note == "openvino int4: it is not there" for note in table.notes)
    assert any(note.startswith("Q4_K has no row") for note in table.notes)


def test_a_type_has_a_row_where_the_models_rows_can_be_written_in_it(tmp_path: Path) -> None:
    narrow, wide = (replace(tiny_spec(), hidden_size=n, intermediate_size=1024) for n in (576, 1024))
    assert gguf_types(narrow) == ("Q8_0", "Q4_0", "Q4_1")
    assert gguf_types(wide) == ("Q8_0", "Q4_0", "Q4_1", "Q4_K")
    assert "Q4_K" not in gguf_types(replace(wide, intermediate_size=1100))
    report = WidthsReport("m", 2, False, "kept texts", 64, 1024, [row("paceline", "Q4_K", 4, 12.5)])
    assert sum("Q4_K" in cells[0] for cells in goal_grid(report).rows) == 2  # one stream, and eight
    assert not any("no row" in note for note in grid(report).notes)


class Steps:
    """A pipeline whose requests get so many tokens in each step; it stands for its own tokenizer and ids."""

    input_ids = np.zeros((1, 3))

    def __init__(self, *requests: list[int]) -> None:
        self.waiting, self.asked, self.ready = list(requests), list[list[int]](), dict[int, int]()
        self.lengths: list[int] = []

    def apply_chat_template(self, messages: object, **options: bool) -> str:
        return "a chat"

    def encode(self, text: str, **options: bool) -> Steps:
        return self

    def add_request(self, number: int, ids: object, config: SimpleNamespace) -> Handle:
        self.lengths.append(config.max_new_tokens)
        self.asked.append(self.waiting.pop(0))
        return Handle(self, number)

    def has_non_finished_requests(self) -> bool:
        return any(self.asked)

    def step(self) -> None:
        self.ready = {number: steps.pop(0) for number, steps in enumerate(self.asked) if steps}


class Handle:
    """A request of ``Steps``."""

    def __init__(self, steps: Steps, number: int) -> None:
        self.steps, self.number = steps, number

    def can_read(self) -> bool:
        return self.steps.ready.get(self.number, 0) > 0

    def read(self) -> dict[int, SimpleNamespace]:
        return {0: SimpleNamespace(generated_ids=[7] * self.steps.ready.pop(self.number))}


def test_the_openvino_worker_gives_each_token_the_time_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request gets a token in each of 2 steps; the second waits, then gets two at once."""
    clock = iter([100.0, 101.0, 103.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    pipeline = Steps([1, 1], [0, 2])
    found = openvino_worker.timed(pipeline, pipeline, SimpleNamespace(), [("one", 2), ("two", 3)])
    assert pipeline.lengths == [2, 3]
    assert found == [
        {"stamps": [1.0, 3.0], "tokens": 2, "prompt_tokens": 3},
        {"stamps": [3.0], "tokens": 2, "prompt_tokens": 3},
    ]


def test_a_peer_that_fails_keeps_no_other_from_being_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def fails(model: str) -> None:
        with install.made(tmp_path / "file") as part:
            assert part is not None
            install.run(sys.executable, "-c", f"open({str(part)!r}, 'w').close(); raise SystemExit(3)")

    installers: dict[str, Callable[[str], None]] = {"first": fails, "second": done.append}
    monkeypatch.setattr(install, "INSTALLERS", installers)
    monkeypatch.setattr(install, "HOME", tmp_path)
    monkeypatch.setattr(sys, "argv", ["install", "--model", "m"])
    with pytest.raises(SystemExit, match=r"first is not installed: .* exit code 3"):
        install.main()
    assert done == ["m"]
    assert not (tmp_path / "file").exists()  # what a failed step began is not taken for the whole
