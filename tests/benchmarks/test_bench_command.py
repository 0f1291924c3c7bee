"""``paceline bench`` as a command: light to import, clear when wrong, whole on the real model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from benchmarks.command import bench
from benchmarks.speculation.bench import Report
from benchmarks.speculation.sweep import SweepReport
from paceline.errors import ConfigError


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(bench, [str(a) for a in arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["Name a colour.", "And another."]},
        {"question_id": 2, "category": "stem", "turns": ["Count: one two three one two three one two"]},
        {"prompt": "word " * 200},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    code = "import sys, benchmarks.command; "
    code += "print([m for m in ('torch', 'numpy', 'benchmarks.jobs') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["speculation", "sweep"])
@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--drafters", "nonsense"], "drafters"),
        (["--json", "absent/folder/x.json"], "json"),
        (["--prompts", "absent.jsonl"], "prompts"),
        (["--model", "no-such-model"], "model"),
    ],
)
def test_what_is_wrong_is_said_before_the_work(command: str, options: list[str], key: str, prompts: Path) -> None:
    result = invoke(command, "--prompts", prompts, *options)
    assert isinstance(result.exception, ConfigError)
    assert result.exception.key == key


@pytest.mark.real_model
def test_speculation(prompts: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    options: list[object] = ["--prompts", prompts, "--model", smollm2_folder, "--threads", 1, "--max-tokens", 6]
    options += ["--turns", "all", "--max-prompt-tokens", 150, "--json", out, "--markdown", page]
    result = invoke("speculation", *options)
    assert result.exit_code == 0, result.output
    report = Report.read(out)
    assert sorted(r.case for r in report.records if r.drafter == "ngram") == ["1/0", "1/1", "2/0"]
    assert report.dropped == {"prompts": 1}
    assert all(s.unequal == 0 for s in report.summaries)
    assert "| mt_bench | ngram |" in page.read_text()
    assert "mt_bench" in result.output


@pytest.mark.real_model
def test_sweep(prompts: Path, tmp_path: Path, smollm2_folder: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--prompts", prompts, "--model", smollm2_folder, "--threads", 1, "--max-tokens", 3]
    result = invoke("sweep", *options, "--batches", "2", "--max-prompt-tokens", 100, "--json", out)
    assert result.exit_code == 0, result.output
    report = SweepReport.read(out)
    assert [(p.drafter, p.batch, p.requests, p.unequal) for p in report.points] == [
        ("none", 2, 12, 0),
        ("ngram", 2, 12, 0),
    ]
    assert report.prompts_repeat
