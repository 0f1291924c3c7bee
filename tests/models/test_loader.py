"""Weights: read once each, refused when damaged, told apart by their digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.models import loader
from paceline.models.digest import weights_digest
from paceline.models.loader import LazyTensors, WeightBag
from paceline.models.weight_files import weight_files


def load_weights(folder: Path, dtype: torch.dtype) -> LazyTensors:
    return LazyTensors(weight_files(folder), dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Two matrices and a table of ids."""
    return {
        "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
        "b.weight": torch.randn(5, generator=torch.Generator().manual_seed(1)),
        "ids": torch.tensor([300, 301], dtype=torch.int64),
    }


def sharded(folder: Path) -> Path:
    """``tensors`` in two files with an index."""
    folder.mkdir(exist_ok=True)
    whole = tensors()
    weight_map = {"a.weight": "m-1.safetensors", "b.weight": "m-2.safetensors", "ids": "m-2.safetensors"}
    for file in set(weight_map.values()):
        save_file({n: whole[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def single(folder: Path, content: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors() if content is None else content, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layout", [single, sharded])
def test_reads_and_converts(tmp_path: Path, layout: Callable[[Path], Path]) -> None:
    loaded = load_weights(layout(tmp_path), torch.bfloat16)
    assert set(loaded) == set(tensors())
    assert loaded["a.weight"].dtype is torch.bfloat16
    assert torch.equal(loaded["b.weight"], tensors()["b.weight"].to(torch.bfloat16))
    assert loaded["ids"].dtype is torch.int64  # 301 would not survive bf16
    assert loaded["ids"].tolist() == [300, 301]


def test_a_file_is_let_go_once_its_tensors_were_taken(tmp_path: Path) -> None:
    """What stays, norms and tables, is copied: a view of the file would keep all of it in memory."""
    folder = single(tmp_path, tensors() | {"table": torch.ones(512, 256)})
    bag = WeightBag(load_weights(folder, torch.float32))
    kept = [bag.take("a.weight"), bag.take("b.weight"), bag.take("ids"), bag.take_table("table", (512, 256))[0]]
    assert str(folder) in Path("/proc/self/maps").read_text()
    bag.finish()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert torch.equal(kept[0], tensors()["a.weight"])
    assert torch.equal(kept[3], torch.ones(512, 256))


def test_each_tensor_is_taken_once(tmp_path: Path) -> None:
    bag = WeightBag(load_weights(single(tmp_path), torch.float32))
    assert bag.take("a.weight", (3, 4)).shape == (3, 4)
    with pytest.raises(ConfigError, match=r"a\.weight.*asked for twice"):
        bag.take("a.weight")
    with pytest.raises(ConfigError, match=r"c\.weight is missing"):
        bag.take("c.weight")
    with pytest.raises(ConfigError, match=r"b\.weight has shape \(5,\), expected \(6,\)"):
        bag.take("b.weight", (6,))


def test_linear_weights_are_rounded_as_they_are_taken() -> None:
    """Nothing else is, the LM head keeps 8 bits, and what a checkpoint has rounded is not rounded again."""
    weight = torch.randn(64, 64)
    bag = WeightBag({"a": weight, "b": weight, "lm_head.weight": weight}).rounded("w4a8")
    linear, head = bag.take_linear("a"), bag.take_linear("lm_head.weight")
    assert isinstance(linear, QuantizedWeight)
    assert isinstance(head, QuantizedWeight)
    assert (linear.bits, head.bits) == (4, 8)
    assert torch.equal(bag.take("b"), weight)
    with pytest.raises(ConfigError, match="quantised already"):
        WeightBag({"a": linear}).rounded("w8a8").take_linear("a")


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Mutant: what is left is told in place of what was loaded."""
    monkeypatch.setattr(loader, "REPORT_EVERY_S", 0.0)
    bag = WeightBag({f"layer.{i}": torch.zeros(1) for i in range(12)})
    with caplog.at_level("INFO"):
        for i in range(3):
            bag.take(f"layer.{i}")
    assert [record.message for record in caplog.records] == [f"{i} of 12 weights are loaded" for i in (1, 2, 3)]


def test_every_left_over_is_named() -> None:
    bag = WeightBag({f"layer.{i}": torch.zeros(1) for i in range(12)})
    bag.take("layer.3")
    with pytest.raises(ConfigError) as raised:
        bag.finish()
    assert all((f"layer.{i}" in str(raised.value)) == (i != 3) for i in (0, 3, *range(4, 10), 11))


def test_harmless_left_overs() -> None:
    names = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    bag = WeightBag({name: torch.zeros(1) for name in names})
    bag.finish()
    assert not any(bag.holds(name) for name in names)  # and the files may be closed


def test_a_tensor_nobody_takes_is_never_read(tmp_path: Path) -> None:
    class Watched(dict[str, torch.Tensor]):
        read: list[str] = []  # noqa: RUF012

        def __getitem__(self, name: str) -> torch.Tensor:
            self.read.append(name)
            return super().__getitem__(name)

    watched = Watched(tensors())
    WeightBag(watched).take("b.weight")
    assert watched.read == ["b.weight"]


def test_second_copy_beside_the_model_is_ignored(tmp_path: Path) -> None:
    single(tmp_path)
    save_file({"layers.0.wq": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert set(load_weights(tmp_path, torch.float32)) == set(tensors())


def test_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.zeros(2)}, tmp_path / name)
    with pytest.raises(ConfigError, match="tensor a is twice in the files"):
        load_weights(tmp_path, torch.float32)


@pytest.mark.parametrize("damage", ["empty", "cut", "header"])
def test_damaged_file(tmp_path: Path, damage: str) -> None:
    file = single(tmp_path) / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes({"empty": b"", "cut": raw[:-4], "header": raw[:8] + b"?" + raw[9:]}[damage])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load_weights(tmp_path, torch.float32)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lacks safetensors files"):
        load_weights(tmp_path, torch.float32)
    (sharded(tmp_path) / "m-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks m-2\.safetensors"):
        load_weights(tmp_path, torch.float32)


@pytest.mark.parametrize("index", ["{", "{}", '{"weight_map": {"a": "../other/model.safetensors"}}'])
def test_index_that_cannot_be_used(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        load_weights(tmp_path, torch.float32)


def test_digest_is_the_same_for_a_copy(tmp_path: Path) -> None:
    shutil.copytree(single(tmp_path / "a"), tmp_path / "b")
    assert weights_digest(tmp_path / "a") == weights_digest(tmp_path / "b")
    assert len(weights_digest(tmp_path / "a")) == 32


def test_digest_sees_a_fine_tune_that_kept_both_ends(tmp_path: Path) -> None:
    """Only a middle tensor differs, far from the first and last 64 KiB: what a merged LoRA looks like."""
    base = {name: torch.zeros(400, 400) for name in ("a.embed", "b.q_proj", "c.norm")}
    tuned = base | {"b.q_proj": torch.full((400, 400), 1e-3)}
    assert weights_digest(single(tmp_path / "a", base)) != weights_digest(single(tmp_path / "b", tuned))


def test_digest_sees_a_renamed_tensor(tmp_path: Path) -> None:
    one, other = {"a": torch.zeros(4)}, {"b": torch.zeros(4)}
    assert weights_digest(single(tmp_path / "a", one)) != weights_digest(single(tmp_path / "b", other))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a": {"data_offsets": [0, 9' + b"9" * 40 + b"]}}",
        b'{"a": {"data_offsets": [-4096, -4096]}}',
        b'{"a": {"data_offsets": [0.5, NaN]}}',
        b'{"a": {"data_offsets": [0]}}',
    ],
)
def test_digest_of_a_header_that_lies(header: bytes, tmp_path: Path) -> None:
    """Mutant: offsets are taken as they are, and the file is read at a place that no file has."""
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ConfigError, match=r"model\.safetensors has a"):
        weights_digest(tmp_path)
