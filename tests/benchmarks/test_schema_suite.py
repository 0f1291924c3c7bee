"""The benchmark of schemas says when it is given none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import schema_suite


def test_a_folder_without_schemas_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["schema_suite", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="2"):
        schema_suite.main()
    assert "nowhere has no schemas; give a draft's folder" in capsys.readouterr().err
