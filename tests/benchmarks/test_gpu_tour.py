"""The tour of a GPU: a dry run on a CPU, stages that fail, hang or do not fit, and what is kept of each."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import probes, tour
from benchmarks.gpu.rows import rows, select
from benchmarks.gpu.stages import STAGES, Stage


def stage(name: str, script: str, limit_s: float = 20.0, **more: Any) -> Stage:
    command = (sys.executable, "-c", script)
    return Stage(name, "", limit_s, command, command, **{"least_s": 0.0} | more)


def states(out: Path) -> dict[str, str]:
    return {each["name"]: each["state"] for each in json.loads((out / "tour.json").read_text())["stages"]}


def test_a_stage_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a stage that hangs is waited for; what it started lives on; it is killed before it can say what it has;
    ``tour.json`` is written at the end alone; a stage that does not fit is begun."""
    monkeypatch.setattr(tour, "MARGIN_S", 1.0)
    told = tmp_path / "seen"
    hangs = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['sh', '-c', 'trap true INT; sleep 50; sleep 50'])\n"
        "print('child', child.pid, flush=True)\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('so far', flush=True)\n"
    )
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    reads = f"import shutil; shutil.copy({str(tmp_path / 'tour.json')!r}, {str(told)!r})"
    asked = [
        stage("beside", "import time; time.sleep(0.2); print('compiled')", beside=True, until="reads"),
        stage("fails", "print('it broke'); raise SystemExit(4)"),
        stage("hangs", hangs, limit_s=5.0),
        stage("deaf", deaf, limit_s=0.6),
        stage("reads", reads),
        stage("large", "pass", least_s=500.0),
        stage("small", "pass"),
    ]
    began = time.monotonic()
    assert tour.Tour(tmp_path, "cpu", 60.0).run(asked) == "large"
    assert time.monotonic() - began < 15.0
    assert states(tmp_path) == {
        "fails": "failed", "hangs": "cut short", "deaf": "cut short", "beside": "passed", "reads": "passed",
        "large": "not begun", "small": "not begun",
    }  # fmt: skip
    assert [each["name"] for each in json.loads(told.read_text())["stages"]] == ["fails", "hangs", "deaf", "beside"]
    found = {each["name"]: each for each in json.loads((tmp_path / "tour.json").read_text())["stages"]}
    assert (found["fails"]["code"], found["fails"]["tail"]) == (4, "it broke\n")
    assert "so far" in found["hangs"]["tail"]
    child = int(found["hangs"]["tail"].split()[1])
    status = Path(f"/proc/{child}/status")
    assert not status.exists() or "(zombie)" in status.read_text()


def test_what_stages_name_is_there() -> None:
    """Tests, rows, options; and each call's worth of stages fits a call."""
    for each in STAGES:
        assert each.limit_s <= 60 * tour.MINUTES
        for part in each.command:
            if part.startswith("tests/"):
                assert (tour.ROOT / part).is_file(), part
        for command in (each.command, each.on_cpu or ()):
            if command[3:4] == ("benchmarks.gpu.probes",):
                asked = command[command.index("--only") + 1 : command.index("--out")] if "--only" in command else ()
                assert {*asked} <= {*probes.NAMES}
            if command[2:4] == ("-m", "benchmarks.gpu"):
                given = gpu.parse(command[4:])
                assert select(rows("llama-8b"), given.rows)
                assert 60 * given.minutes < each.limit_s
    assert sum(each.limit_s for each in STAGES if not each.beside) < 35 * 60
    with pytest.raises(SystemExit):
        tour.main(["--out", "x", "--device", "tpu"])
    assert tour.main(["--out", "x", "--from", "nowhere"]) == 2


def test_a_dry_run_on_a_cpu(tmp_path: Path) -> None:
    """Mutant: a stage's files are written elsewhere."""
    assert tour.main(["--out", str(tmp_path), "--device", "cpu", "--minutes", "4"]) == 0
    ran = {"links", "rows", "probes"}
    assert states(tmp_path) == {each.name: "passed" if each.name in ran else "left out" for each in STAGES}
    assert json.loads((tmp_path / "rows.json").read_text())["rows"][0]["value"] > 0
    found = json.loads((tmp_path / "probes.json").read_text())
    assert list(found) == list(probes.NAMES)
    assert not [name for name, answer in found.items() if "FAILED" in answer]
    assert {file.name for file in tmp_path.iterdir()} == {
        "tour.json", "tour.log", "beside.log", "rows.json", "probes.json",
    }  # fmt: skip
