"""GGUF files that were split: all parts are one file, whatever part is named; parts that do not belong together."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.assembly.model_plan import plan_model
from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.quantized import QuantizedWeight
from paceline.models import digest, hub
from paceline.models.digest import weights_digest
from paceline.models.gguf.convert import convert
from paceline.models.gguf.file import GgufFile
from paceline.models.loader import LazyTensors
from paceline.models.registry import load_target, open_checkpoint
from paceline.models.weight_files import gguf_file, gguf_parts, weight_files
from tests.models.quantization.test_checkpoints import logits
from tests.support.gguf_files import write_gguf

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def write_parts(folder: Path, split: int = 6, *, fields_apart: bool = False) -> list[Path]:
    write_gguf(folder / "tiny.gguf", "llama", split=split, fields_apart=fields_apart)
    return sorted(folder.glob("*.gguf"))


def equal(one: object, other: object) -> bool:
    if isinstance(one, QuantizedWeight) and isinstance(other, QuantizedWeight):
        return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    assert isinstance(one, torch.Tensor)
    assert isinstance(other, torch.Tensor)
    return torch.equal(one, other)


@pytest.mark.parametrize(("split", "apart", "count"), [(6, False, 2), (1, False, 11), (4, True, 4)])
def test_parts_are_one_file(split: int, apart: bool, count: int, tmp_path: Path) -> None:
    """As the same file in one piece, by any part and by the folder. Mutants: every tensor is read from the first part;
    the first part's tensors alone; the parts in another order."""
    write_gguf(tmp_path / "whole" / "tiny.gguf", "llama")
    parts = write_parts(tmp_path / "parts", split, fields_apart=apart)
    assert len(parts) == count
    whole = hub.resolve_model(str(tmp_path / "whole"))
    folder = hub.resolve_model(str(parts[0]))
    assert hub.resolve_model(str(parts[-1])) == folder
    links = {file.name: file.resolve() for file in folder.iterdir() if file.is_symlink()}
    assert links == {part.name.replace("tiny", "model"): part for part in parts}  # no second copy
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_text() == (whole / name).read_text()
    mine, theirs = open_checkpoint(folder, torch.float32), open_checkpoint(whole, torch.float32)
    assert set(mine) == set(theirs)
    assert all(equal(mine[name], weight) for name, weight in theirs.items())
    assert torch.equal(logits(hub.resolve_model(str(tmp_path / "parts"))), logits(whole))
    assert plan_model(tmp_path / "parts", torch.bfloat16) == plan_model(whole, torch.bfloat16)


def test_a_whole_folder_in_bf16(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    meant = write_gguf(tmp_path / "tiny.gguf", "llama")
    (tmp_path / "folder").mkdir()
    convert(parts[0], tmp_path / "folder", lambda what, share: None)
    written = LazyTensors(weight_files(tmp_path / "folder"), torch.float32)
    assert {name: weight.shape for name, weight in meant.items()} == {name: written[name].shape for name in written}


def test_parts_that_are_links(tmp_path: Path) -> None:
    """As a hub's cache has them, to files whose names say nothing. Mutant: parts are looked for where the first one's
    link leads."""
    parts = write_parts(tmp_path / "parts")
    (tmp_path / "blobs").mkdir()
    for i, part in enumerate(parts):
        part.rename(tmp_path / "blobs" / f"{i}0e1")
        part.symlink_to(tmp_path / "blobs" / f"{i}0e1")
    folder = hub.resolve_model(str(parts[0]))
    assert [file.resolve().parent.name for file in sorted(folder.glob("*.gguf"))] == ["blobs"] * len(parts)
    assert load_target(folder, torch.bfloat16, CPU).spec.num_layers == 1  # every tensor was found, once


def test_every_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that changes makes another model. Mutants: the digest and the folder are of the first part alone; the
    header of a part without tensors does not count."""
    monkeypatch.setattr(digest, "EDGE_BYTES", 64)  # small beside the tiny headers
    parts = write_parts(tmp_path / "parts", 4, fields_apart=True)
    folder = hub.resolve_model(str(parts[0]))
    before = weights_digest(folder)
    last = GgufFile(parts[0]).tensors["blk.0.ffn_down.weight"]
    assert last.part == 2
    data = bytearray(parts[last.part].read_bytes())
    data[last.offset + last.num_bytes // 2] ^= 1
    parts[last.part].write_bytes(data)
    assert hub.resolve_model(str(parts[0])) != folder
    assert weights_digest(hub.resolve_model(str(parts[0]))) != before
    before = weights_digest(hub.resolve_model(str(parts[0])))
    header = bytearray(parts[0].read_bytes())
    header[header.index(b"<|im_start|>") + 2] ^= 1  # of the part without tensors
    parts[0].write_bytes(header)
    assert weights_digest(hub.resolve_model(str(parts[0]))) != before


def set_number(part: Path, key: bytes, value: int, layout: str = "<H") -> None:
    data = bytearray(part.read_bytes())
    struct.pack_into(layout, data, data.index(key) + len(key) + 4, value)
    part.write_bytes(data)


def same_tensors(parts: list[Path]) -> None:
    """The second part in place of the third."""
    shutil.copy(parts[1], parts[2])
    set_number(parts[2], b"split.no", 2)
    for part in parts:
        set_number(part, b"split.tensors.count", 12, "<i")


def of_another_model(parts: list[Path]) -> None:
    """The second one, of as many parts."""
    write_gguf(parts[0].parent / "other" / "qwen.gguf", "qwen3", split=5)
    shutil.copy(parts[0].parent / "other" / "qwen-00002-of-00003.gguf", parts[1])


def with_fields_of_another_model(parts: list[Path]) -> None:
    """The first part of another model in place of the second, with the right numbers."""
    write_gguf(parts[0].parent / "other" / "qwen.gguf", "qwen3", split=5)
    shutil.copy(parts[0].parent / "other" / "qwen-00001-of-00003.gguf", parts[1])
    set_number(parts[1], b"split.no", 1)
    for part in parts:
        set_number(part, b"split.tensors.count", 12, "<i")


Change = Callable[[list[Path]], object]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda parts: parts[1].unlink(), "lacks tiny-00002-of-00003.gguf of the 3 parts of tiny"),
        (lambda parts: [part.unlink() for part in parts[1:]], "lacks tiny-00002-of-00003.gguf, tiny-00003"),
        (lambda parts: set_number(parts[1], b"split.no", 2), r"00002-of-00003.gguf: split.no is 2, expected 1"),
        (lambda parts: set_number(parts[2], b"split.count", 4), "split.count is 4, expected 3"),
        (lambda parts: set_number(parts[0], b"split.tensors.count", 12, "<i"), "tensors.count is 12, expected 11"),
        (lambda parts: shutil.copy(parts[2], parts[1]), r"tiny-0000\d-of-00003.gguf: split.\S+ is \d+, expected"),
        (same_tensors, "tensor .* is in two parts of tiny-00001-of-00003.gguf"),
        (of_another_model, "split.tensors.count is 11, expected 12"),
        (with_fields_of_another_model, "another file than tiny-00001-of-00003.gguf: general.architecture differs"),
        (lambda parts: parts[1].write_bytes(b""), "00002-of-00003.gguf is not a GGUF file"),
        (lambda parts: parts[2].write_bytes(parts[2].read_bytes()[:-64]), "00003-of-00003.gguf .* ends after the file"),
    ],
)  # fmt: skip
def test_refused(change: Change, named: str, tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", 4)
    assert len(parts) == 3
    change(parts)
    for model in (parts[0], parts[0].parent):
        with pytest.raises(ConfigError, match=named):
            hub.resolve_model(str(model))


@pytest.mark.parametrize(("name", "named"), [
    ("tiny-00000-of-00003.gguf", "is part 0 of 3"), ("tiny-00004-of-00003.gguf", "is part 4 of 3"),
    ("tiny-00001-of-99999.gguf", "is part 1 of 99999, expected 1 to 1024 parts"),
    ("tiny-00001-of-00900.gguf", "lacks .* and 894 more of the 900 parts"),
    ("other.gguf", r"one of 2 files, but its name does not end in -00001-of-00002\.gguf"),
])  # fmt: skip
def test_names(name: str, named: str, tmp_path: Path) -> None:
    first, _ = write_parts(tmp_path / "parts")
    (tmp_path / name).write_bytes(first.read_bytes())
    with pytest.raises(ConfigError, match=named):
        hub.resolve_model(str(tmp_path / name))


def test_one_part_is_a_file(tmp_path: Path) -> None:
    """And one that was put together again, whose count is 0, is one too."""
    for name, count in (("tiny-00001-of-00001.gguf", 1), ("tiny.gguf", 0)):
        write_gguf(tmp_path / str(count) / name, "llama", fields={"split.count": count, "split.no": 0})
        folder = hub.resolve_model(str(tmp_path / str(count)))
        assert gguf_file(folder) == folder / "model.gguf"


def test_two_sets_in_a_folder(tmp_path: Path) -> None:
    """Mutant: the first of all parts is served."""
    parts = write_parts(tmp_path / "parts")
    assert gguf_parts(parts[1]) == parts
    shutil.copy(parts[0], tmp_path / "parts" / "other-00001-of-00002.gguf")
    with pytest.raises(ConfigError, match="has 3 GGUF files"):
        hub.resolve_model(str(tmp_path / "parts"))
