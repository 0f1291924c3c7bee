"""``paceline bench handoff``, whole, on a small model and a short prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.command import bench
from benchmarks.handoff.report import HandoffReport
from tests.multihost.small_model import KV_BYTES_PER_TOKEN, SPEC, write_model

VOCAB = 49152  # of the prompts that the benchmark makes


@pytest.mark.e2e
def test_a_whole_run(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"
    model = write_model(tmp_path / "small", replace(SPEC, vocab_size=VOCAB))
    options: list[object] = ["--model", model, "--prompt-tokens", 96, "--chunk-tokens", 32, "--repeats", 1]
    result = CliRunner().invoke(
        bench, ["handoff", *map(str, [*options, "--drafter", "none", "--json", out, "--markdown", page])]
    )
    assert result.exit_code in (0, 1), result.output  # the bounds are of a longer prompt
    read = HandoffReport.read(out)
    (repetition,) = read.repetitions
    assert repetition.overlapped.num_bytes == 96 * KV_BYTES_PER_TOKEN
    assert repetition.moved.num_bytes == 96 * KV_BYTES_PER_TOKEN
    assert 0.0 < repetition.moved.whole_s < 10.0
    assert "exposed / sender busy" in page.read_text()
