"""The GPU benchmark on CPU, at tiny sizes: synthetic acceptance, every row, what it drops."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import rows as gpu_rows
from benchmarks.gpu.bench import Bench, Figure, Options, Unavailable, why
from benchmarks.gpu.clock import Clock, Sample, joined, measure_ceilings
from benchmarks.gpu.floors import (
    Ceilings,
    weight_bytes,
)
from benchmarks.gpu.report import Host, Result, table, to_json
from benchmarks.gpu.rows import SWEEP, TABLE, Reach, Row, fit, rows, select
from benchmarks.gpu.shapes import SHAPES, load_shape, next_token
from benchmarks.gpu.speed import generate, over_transformers, same_so_far, synthetic_speedup
from benchmarks.gpu.steps import NeverRight, round_overhead
from benchmarks.speculation.synthetic import LABEL, RATES, Rates, SyntheticDrafts
from paceline.assembly.build import assemble, build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import RunnerIdentity
from paceline.errors import ConfigError
from paceline.spec_decode.drafters.select import SelectingDrafter
from tests.support.tiny_model import tiny_request, tiny_runner

EIGHT = SHAPES["llama-8b"]
CPU = torch.device("cpu")
H200 = Ceilings(4.3e12, 780e12)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    options = Options("cpu", "fp32", "tiny", "", 0, RATES["tau3"])
    return Bench(options, Clock(CPU, 0.01), Ceilings(1e9, 1e10), tmp_path_factory.mktemp("heads"))


# ---- time


@pytest.mark.parametrize(
    ("intervals", "gap", "expected"),
    [
        ([], 0.0, 0.0),
        ([(1, 2), (3, 4)], 0.0, 2.0),
        ([(3, 4), (1, 2)], 1.0, 3.0),
        ([(1, 5), (2, 3)], 0.0, 4.0),
        ([(1, 3), (2, 6)], 0.0, 5.0),
        ([(0, 1), (1.5, 2), (9, 10)], 0.5, 3.0),
    ],
)
def test_joined(intervals: list[tuple[float, float]], gap: float, expected: float) -> None:
    assert joined(intervals, gap) == pytest.approx(expected)


def test_clock() -> None:
    calls: list[int] = []
    clock = Clock(CPU, limit_s=0.0)
    sample = clock.wall(lambda: calls.append(1), warm_up=2)
    assert (len(calls), len(sample.seconds)) == (7, 5)
    assert len(clock.wall(lambda: None, repeats=3).seconds) == 3
    assert clock.busy(lambda: None) is None
    assert Sample((1.0, 3.0, 2.0, 4.0)).median == 2.5
    assert Sample((1.0, 3.0, 2.0, 4.0)).spread == pytest.approx(0.6)
    found = measure_ceilings(clock, torch.float32)
    assert found.copy_bytes_per_s > 1e6
    assert found.matmul_flops_per_s > 1e6


# ---- synthetic acceptance


def test_the_tables_promise_what_they_are_called() -> None:
    assert RATES["tau3"].acceptance_length(4) == pytest.approx(3.0, abs=0.01)
    assert RATES["tau2"].acceptance_length(4) == pytest.approx(2.0, abs=0.01)
    assert Rates((0.5,)).acceptance_length(4) == 1.5
    for bad in ((), (1.2,), (-0.1,)):
        with pytest.raises(ValueError, match="probabilities"):
            Rates(bad)


def test_draws_follow_the_table_and_nothing_else() -> None:
    rates = RATES["tau3"]
    drawn = [rates.accepted(7, f"r{i}", position, 4) for i in range(40) for position in range(100, 200)]
    assert sum(drawn) / len(drawn) == pytest.approx(rates.acceptance_length(4) - 1.0, abs=0.06)
    first = sum(count > 0 for count in drawn) / len(drawn)
    assert first == pytest.approx(rates.table[0], abs=0.03)
    assert rates.accepted(7, "r1", 150, 4) == rates.accepted(7, "r1", 150, 4)
    assert drawn != [rates.accepted(8, f"r{i}", position, 4) for i in range(40) for position in range(100, 200)]
    assert [Rates((1.0, 1.0)).accepted(0, "r", 5, depth) for depth in (0, 1, 2, 3)] == [0, 1, 2, 2]


def test_exchanged_drafts_are_accepted_as_drawn_and_change_no_text() -> None:
    asked = [tiny_request(index=i, max_tokens=40, ignore_eos=True) for i in range(3)]
    clock = Clock(CPU)
    plain = generate(tiny_runner(drafter="none"), asked, clock)
    runner = tiny_runner(drafter="ngram")
    runner.drafter = drafting = NeverRight(5, 3)
    drafts = SyntheticDrafts(drafting, plain.token_ids, Rates((1.0, 1.0, 0.0)), 0, runner.vocab_size)
    ours = generate(runner, asked, clock)
    assert same_so_far(ours, plain) == []
    assert drafts.exchanged == ours.sequence_rounds
    assert ours.acceptance_length == pytest.approx(3.0, abs=0.1)  # two drafts and the bonus, but at the end
    drafts.restore()
    assert generate(runner, asked, clock).acceptance_length == pytest.approx(1.0, abs=0.1)


def test_a_wrong_recording_is_never_accepted() -> None:
    asked = [tiny_request(index=0, max_tokens=30, ignore_eos=True)]
    plain = generate(tiny_runner(drafter="none"), asked, Clock(CPU))
    wrong = {name: [(token + 1) % 199 for token in tokens] for name, tokens in plain.token_ids.items()}
    runner = tiny_runner(drafter="ngram")
    runner.drafter = NeverRight(5, 3)
    SyntheticDrafts(runner.drafter, wrong, Rates((1.0, 1.0, 1.0, 1.0)), 0, runner.vocab_size)
    ours = generate(runner, asked, Clock(CPU))
    assert same_so_far(ours, plain) == []
    assert ours.acceptance_length == 1.0


# ---- shapes


@pytest.mark.parametrize("tied", [False, True])
def test_random_targets_answer_by_rule(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(SHAPES["tiny"], tie_word_embeddings=tied, qk_norm=tied)
    monkeypatch.setitem(SHAPES, "tiny", spec)
    model = load_shape("tiny", torch.bfloat16, CPU)
    config = NodeConfig.model_validate({"model": "tiny", "drafter": "none", "kv_cache_tokens": 512})
    runner = assemble(config, model, RunnerIdentity("tiny", "", ""))
    done = generate(runner, [tiny_request([5, 90, 311, 7], max_tokens=12)], Clock(CPU))
    token, expected = 7, []
    for _ in range(12):
        token = next_token(spec, token)
        expected.append(token)
    assert list(done.token_ids["r0"]) == expected


def test_the_shapes_have_the_sizes_of_their_models() -> None:
    def total(name: str) -> int:
        spec = SHAPES[name]
        return weight_bytes(spec, 1) + (0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size)

    assert total("llama-8b") / 1e9 == pytest.approx(8.03, abs=0.01)
    assert total("qwen3-0.6b") / 1e9 == pytest.approx(0.596, abs=0.002)


# ---- rows


def test_the_reaches() -> None:
    found = {row.key: str(row.reach) for row in rows("llama-8b") if row.reach}
    assert found == {
        "decode_b1": ">= 0.8",
        "decode_b64": ">= 0.7",
        "prefill_4k": ">= 0.6",
        "prefill_16k": ">= 0.6",
        "verify_b1": "<= 1.1",
        "verify_b32": "<= 1.15",
        "draft_step": "<= 0.06",
        "round_overhead": "<= 0.05",
        "speedup_b1": ">= 2.3",
        "speedup_b32": ">= 1.5",
        "pages": ">= 0.6",
        "transformers_b1": ">= 3",
        "transformers_b32": ">= 4",
    }
    assert not [row for row in rows("qwen3-0.6b") if row.reach]
    every = [row.key for row in rows("llama-8b")]
    assert len(every) == len(set(every))
    assert {"step_b1_c128", "step_b256_c32768", "smollm2_b1", "qwen_round"} <= set(every)


def test_bounds() -> None:
    assert Reach(0.8).holds(0.8)
    assert not Reach(0.8).holds(0.79)
    assert Reach(1.1, at_least=False).holds(1.1)
    assert not Reach(1.1, at_least=False).holds(1.11)


def test_select() -> None:
    every = rows("tiny")
    assert select(every, "") == every
    assert [row.key for row in select(every, "pages, decode_b1")] == ["decode_b1", "pages"]
    assert {row.group for row in select(every, "sweep")} == {SWEEP}
    assert {row.group for row in select(every, "table")} == {TABLE}
    with pytest.raises(ConfigError, match="nonsense"):
        select(every, "decode_b1,nonsense")


def row(key: str, estimate_s: float, group: str = TABLE, value: float = 1.0, reach: Reach | None = None) -> Row:
    return Row(key, key, "x", reach, estimate_s, lambda bench: Figure(value, f"{value:g}"), group)


def test_large_points_go_first_and_the_sweep_before_the_table() -> None:
    every = [row("a", 10), row("b", 40), row("small", 5, SWEEP), row("large", 30, SWEEP)]

    def kept(seconds: float, pace: float = 1.0) -> list[str]:
        fits, left = fit(every, seconds, pace)
        assert sorted(map(id, [*fits, *left])) == sorted(map(id, every))
        return [each.key for each in fits]

    assert kept(85) == ["a", "b", "small", "large"]
    assert kept(84) == ["a", "b", "small"]
    assert kept(54) == ["a", "b"]
    assert kept(49) == ["a"]
    assert kept(9) == []
    assert kept(100, pace=2.0) == ["a", "b"]


def test_time_runs_out_in_the_middle(bench: Bench) -> None:
    """The first row's seconds say nothing (it compiles and loads); the second's three-fold ones count."""
    now = 0.0

    def taking(key: str, seconds: float, group: str = TABLE) -> Row:
        def measure(bench: Bench) -> Figure:
            nonlocal now
            now += seconds
            return Figure(1.0, "1")

        return replace(row(key, 10, group), measure=measure)

    asked = [taking("first", 50), taking("slow", 30), taking("third", 10), taking("fourth", 10, SWEEP)]
    told: list[int] = []
    results = gpu.measure(bench, asked, 105, lambda results: told.append(len(results)), lambda: now)
    assert told == [1, 2, 4]
    assert [result.row.key for result in results] == ["first", "slow", "third", "fourth"]
    assert [result.figure is not None for result in results] == [True, True, False, False]
    assert [result.missing for result in results[2:]] == ["dropped: about 30 s, no time left for it"] * 2
    assert [result.took_s for result in results] == [50.0, 30.0, 0.0, 0.0]


def test_a_row_that_fails_takes_no_other_with_it(bench: Bench) -> None:
    def fails(bench: Bench) -> Figure:
        raise RuntimeError("no such kernel\nmore")

    def lacks(bench: Bench) -> Figure:
        raise Unavailable("no such thing here")

    asked = [replace(row("fails", 1), measure=fails), replace(row("lacks", 1), measure=lacks), row("works", 1)]
    results = gpu.measure(bench, asked, 60, lambda results: None)
    assert [result.missing for result in results] == [
        "FAILED: RuntimeError: no such kernel",
        "not measured: no such thing here",
        "",
    ]


def test_a_row_whose_attention_fell_back_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target's or drafter's, by a forward or by name, and sampling. Mutants: only the target's attention is watched;
    torch may sample."""

    def measured(bench: Bench) -> Figure:
        runner = bench.runner("tiny", 1, 64, 2, "eagle3")
        assert isinstance(runner.drafter, SelectingDrafter)
        runner.drafter.primary.attention.left = {"tree rows"}  # type: ignore[attr-defined]
        return Figure(1.0, "1")

    asked = [replace(row("falls", 1), measure=measured), row("works", 1)]
    results = gpu.measure(bench, asked, 60, lambda results: None)
    assert [r.missing for r in results] == ["FAILED: fell back: tree rows", ""]
    runner = bench.runner("tiny", 1, 64, 0)
    monkeypatch.setattr(bench.clock, "on_gpu", True)
    by_torch = "sampling is not the kernels'"
    assert bench.fell_back() == [f"{runner.attention.name} in place of auto", by_torch]
    assert bench.fell_back() == []


def test_verdicts_and_notes() -> None:
    reach = Reach(2.0)
    missed = Result(row("m", 1, reach=reach), Figure(1.0, "1", hints=("look there",), synthetic=True))
    held = Result(row("h", 1, reach=reach), Figure(3.0, "3", hints=("look there",)))
    wrong = Result(row("w", 1, reach=reach), Figure(3.0, "3", wrong="the text differs"))
    none = Result(row("n", 1), Figure(3.0, "3"))
    assert [each.verdict for each in (missed, held, wrong, none)] == ["MISSED", "holds", "WRONG", ""]
    assert missed.notes == ("synthetic acceptance", "look there")
    assert held.notes == ()
    assert wrong.notes == ("the text differs",)


def test_hints() -> None:
    runner = tiny_runner(drafter="none")
    assert why(runner, 1.0, None, 1.0) == ()
    assert why(runner, 1.0, 0.99, 0.95) == ()
    host, kernels = why(runner, 2.0, 1.5, 1.0)
    assert "25 %" in host
    assert "1.50 x the floor" in kernels


def test_a_round_is_held_against_its_kernels(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="no kernels"):
        round_overhead(bench, "tiny", 2048)
    monkeypatch.setattr(bench.clock, "busy", lambda work, calls=5: (work(), 1e-3)[1])
    figure = round_overhead(bench, "tiny", 2048)
    assert figure.value == pytest.approx(figure.samples["round"].median / 1e-3 - 1.0)


def test_unexchanged_drafts_are_no_measurement(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyntheticDrafts, "_exchange", lambda self, seq, tree: tree)
    assert "no draft was exchanged" in synthetic_speedup(bench, "tiny", 1, 2048, 64).wrong


# ---- the command


def test_a_gpu_has_its_queues_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's, and the benchmark's. Mutant: they are set behind the first look at the device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(pytest.fail("too early")) if not queues() else False)
    starts: list[Callable[[], object]] = [
        lambda: gpu.run(["--device", "cuda"]),
        lambda: build_runner(NodeConfig(model="tiny", device="cuda:0", drafter="none")),
    ]
    for start in starts:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        with pytest.raises(ConfigError, match="CUDA build"):
            start()
        assert queues() == "32"


def queues() -> str:
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "SWEEP_BATCHES", (1, 256))
    monkeypatch.setattr(gpu_rows, "SWEEP_CONTEXTS", (128,))


def test_every_row_runs_on_cpu(tmp_path: Path, no_sweep: None) -> None:
    out = tmp_path / "gpu.json"
    console = Console(width=180, file=io.StringIO(), record=True)
    arguments = ["--target", "tiny", "--device", "cpu", "--dtype", "fp32", "--sample-seconds", "0.01"]
    assert gpu.run([*arguments, "--no-transformers", "--seed", "3", "--out", str(out)], console) == 0
    written = json.loads(out.read_text())
    found = {each["key"]: each for each in written["rows"]}
    assert list(found) == [each.key for each in rows("tiny")]
    missing = {key: each["missing"] for key, each in found.items() if each["value"] is None}
    assert {key: text.split(":")[0] for key, text in missing.items()} == dict.fromkeys(
        ["round_overhead", "transformers_b1", "transformers_b32", "smollm2_b1", "smollm2_b8", "smollm2_b32"],
        "not measured",
    )
    assert [key for key, each in found.items() if each["value"] is not None and each["value"] <= 0] == []
    assert not [key for key, each in found.items() if each["verdict"]]  # no reach is of this shape
    for key in ("speedup_b1", "speedup_b32"):
        assert found[key]["synthetic"]
        assert "synthetic acceptance" in found[key]["notes"]
        assert (
            found[key]["facts"]["requests_equal"].split("/")[0] == found[key]["facts"]["requests_equal"].split("/")[1]
        )
        assert 2.0 < found[key]["facts"]["acceptance_length"] < 4.5
    samples = found["decode_b1"]["samples"]["step"]
    assert len(samples["seconds"]) >= 5
    assert samples["median_s"] == Sample(tuple(samples["seconds"])).median
    assert written["options"]["seed"] == 3
    assert written["host"]["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert written["ceilings"]["copy_bytes_per_s"] > 0
    assert written["synthetic_acceptance"] == LABEL
    assert LABEL in console.export_text().replace("\n", " ")


def test_our_model_and_transformers_write_the_same_text(bench: Bench) -> None:
    figure = over_transformers(bench, "tiny", 2, 2048, 48)
    assert figure.facts["texts_equal"] == "2/2"
    assert figure.value > 0


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(["--list", "--rows", "pages"]) == 0
    assert ">= 0.6" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="rates"):
        gpu.parse_rates("0.5,often")
    assert gpu.parse_rates("0.5,0.25").table == (0.5, 0.25)
    assert gpu.parse_rates("tau3") is RATES["tau3"]


def test_no_large_target_is_made_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--target tiny"):
        gpu.run(["--rows", "decode_b1"])


def test_nothing_is_measured_over_the_reference_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="FlashInfer cannot be imported"):
        gpu.run(["--rows", "decode_b1"])
    monkeypatch.setattr(gpu, "runs_triton", lambda device: False)
    with pytest.raises(ConfigError, match="triton is not installed"):
        gpu.run(["--rows", "decode_b1", "--attention", "triton"])


def test_the_exit_code_and_the_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_COMMIT", "abc123")
    options = Options("cpu", "fp32", "tiny", "", 0, RATES["tau3"])
    host = Host.read(CPU)
    assert host.commit == "abc123"
    missed = [Result(row("m", 1, reach=Reach(2.0)), Figure(1.0, "1"))]
    assert json.loads(to_json(missed, options, H200, host))["rows"][0]["verdict"] == "MISSED"
    assert table(missed, options, H200, host).row_count == 1
    monkeypatch.setattr(gpu, "rows", lambda target: [row("m", 1, reach=Reach(2.0))])
    quiet = Console(quiet=True)
    assert gpu.run(["--device", "cpu", "--target", "tiny", "--out", str(tmp_path / "o.json")], quiet) == 1
