"""``paceline bench handoff``, whole, on the real model and a short prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.command import bench
from benchmarks.handoff.report import HandoffReport


@pytest.mark.real_model
def test_a_whole_run(tmp_path: Path, smollm2_folder: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    options: list[object] = ["--model", smollm2_folder, "--prompt-tokens", 96, "--chunk-tokens", 32, "--repeats", 1]
    result = CliRunner().invoke(
        bench, ["handoff", *map(str, [*options, "--drafter", "none", "--json", out, "--markdown", page])]
    )
    assert result.exit_code in (0, 1), result.output  # the bounds are of a longer prompt
    read = HandoffReport.read(out)
    (repetition,) = read.repetitions
    assert repetition.overlapped.num_bytes == 96 * 30 * 2 * 3 * 64 * 2
    assert repetition.moved.num_bytes == 96 * 30 * 2 * 3 * 64 * 2
    assert 0.0 < repetition.moved.whole_s < 10.0
    assert "exposed / sender busy" in page.read_text()
