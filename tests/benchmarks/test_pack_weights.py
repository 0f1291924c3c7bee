"""Folders cut into pieces and joined again, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import pack_weights
from benchmarks.pack_weights import MANIFEST, join, split
from paceline.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(random.Random(1).randbytes(50_000))
    (made / "config.json").write_text("{}")
    (made / "empty").write_bytes(b"")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("xz", [False, True])
@pytest.mark.parametrize("piece_bytes", [1000, 7919, 10_000_000])
def test_there_and_back(folder: Path, tmp_path: Path, xz: bool, piece_bytes: int) -> None:
    pieces = split(folder, tmp_path / "pieces", piece_bytes, xz)
    assert all(piece.num_bytes == piece_bytes for piece in pieces[:-1])
    assert 0 < pieces[-1].num_bytes <= piece_bytes
    assert {path.name for path in (tmp_path / "pieces").iterdir()} == {MANIFEST, *(piece.name for piece in pieces)}
    assert join(tmp_path / "pieces", tmp_path / "again") == ["config.json", "empty", "model.safetensors"]
    assert contents(tmp_path / "again") == contents(folder)


@pytest.mark.parametrize("harm", ["missing", "changed", "cut", "no manifest", "escaping"])
def test_pieces_that_are_not_as_they_were(folder: Path, tmp_path: Path, harm: str) -> None:
    pieces = tmp_path / "pieces"
    split(folder, pieces, 20_000)
    second, manifest = pieces / "piece-001", pieces / MANIFEST
    if harm == "missing":
        second.unlink()
    elif harm == "changed":
        second.write_bytes(b"x" + second.read_bytes()[1:])
    elif harm == "cut":
        second.write_bytes(second.read_bytes()[:-1])
    elif harm == "no manifest":
        manifest.unlink()
    else:
        (tmp_path / "outside").write_bytes(second.read_bytes())
        manifest.write_text(manifest.read_text().replace("piece-001", "../outside"))
    with pytest.raises(ConfigError, match="pieces"):
        join(pieces, tmp_path / "again")
    assert not [path for path in tmp_path.iterdir() if "again" in path.name]


def test_nothing_is_overwritten(folder: Path, tmp_path: Path) -> None:
    split(folder, tmp_path / "pieces", 20_000)
    with pytest.raises(ConfigError, match="not empty"):
        split(folder, tmp_path / "pieces", 20_000)
    with pytest.raises(ConfigError, match="exists already"):
        join(tmp_path / "pieces", folder)
    with pytest.raises(ConfigError, match="no files"):
        split(tmp_path / "nowhere", tmp_path / "other", 20_000)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces, again = str(tmp_path / "pieces"), str(tmp_path / "again")
    pack_weights.run(["split", str(folder), "--into", pieces, "--piece-mib", "0.02"])
    assert "3 pieces" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "pieces" / MANIFEST).read_text())["pieces"]) == 3
    pack_weights.run(["join", pieces, "--into", again])
    assert contents(tmp_path / "again") == contents(folder)
