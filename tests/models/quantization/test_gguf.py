"""GGUF files as they lie: numbers against gguf's own reader, whole folders, and headers that lie."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.packed import PackedMatrix
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.digest import weights_digest
from paceline.models.gguf.blocks import KEPT
from paceline.models.gguf.convert import _named_ends
from paceline.models.gguf.fields import Fields
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.gguf.tensors import GgufTensors
from paceline.models.gguf.tokenizer import PRE_TOKENIZERS
from paceline.models.registry import open_checkpoint
from paceline.text.tokenizer import Tokenizer
from tests.models.quantization.test_checkpoints import logits
from tests.support.gguf_files import DIM, HEADS, KV_HEADS, random_blocks, write_gguf
from tests.support.needs import needs_kernels


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("kind", KEPT)
def test_blocks_mean_what_ggufs_reader_says(kind: Kind) -> None:
    rows = random_blocks(kind, 5, 512, np.random.default_rng(2))
    weight = weight_of_blocks(rows, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    assert weight.shape == (5, 512)
    assert torch.allclose(weight.dequantised(), expected, rtol=1e-6, atol=1e-7)
    limit = 1 << (weight.bits - 1)
    assert -limit <= int(weight.codes.min()) <= int(weight.codes.max()) < limit


@needs_kernels
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K])
def test_blocks_take_as_many_bytes_as_in_the_file(kind: Kind) -> None:
    """Mutant: whole numbers and their steps kept as the float32 that they make, or codes of 6
    bits in 8."""
    rows, library = random_blocks(kind, 64, 1024, np.random.default_rng(3)), load_kernels()
    assert library is not None
    packed = PackedMatrix(library, weight_of_blocks(rows, kind), None).packed
    assert packed.numel() <= 1.03 * rows.size


class TestFolder:
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    def test_loads_as_the_floats_that_it_means(self, architecture: str, tmp_path: Path) -> None:
        """Mutants: Llama's rows of q and k left interleaved; or Qwen's taken for interleaved; one end of Qwen's two."""
        meant = write_gguf(tmp_path / "tiny.gguf", architecture)
        folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
        assert hub.resolve_model(str(tmp_path / "tiny.gguf")) == folder
        assert [file.name for file in folder.iterdir() if file.is_symlink()] == ["model.gguf"]  # no second copy
        spec = ModelSpec.from_folder(folder)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HEADS, KV_HEADS, DIM)
        assert spec.eos_token_ids == ((2,) if architecture == "llama" else (2, 0))  # as Qwen's generation_config.json
        found = open_checkpoint(folder, torch.float32)
        assert isinstance(found["model.layers.0.self_attn.q_proj.weight"], QuantizedWeight)
        assert set(found) == set(meant)
        for name, weight in meant.items():
            mine = found[name]
            mine = mine.dequantised() if isinstance(mine, QuantizedWeight) else mine
            assert torch.allclose(mine, weight, rtol=1e-6, atol=1e-6), name
        plain = tmp_path / "floats"
        plain.mkdir()
        for name in ("config.json", "generation_config.json"):
            (plain / name).write_text((folder / name).read_text())
        save_file({name: weight.contiguous() for name, weight in meant.items()}, plain / "model.safetensors")
        mine, theirs = logits(folder), logits(plain)
        assert ((mine - theirs).norm() / theirs.norm()).item() < 0.05  # inputs are rounded to int8
        assert weights_digest(folder) != weights_digest(plain)

    @pytest.mark.parametrize(
        ("architecture", "ends"),
        [
            ("llama", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),  # Llama 3.1's generation_config.json
            ("qwen2", ["<|endoftext|>", "<|im_end|>"]),
            ("qwen3moe", ["<|endoftext|>", "<|im_end|>"]),
            ("deepseek2", ["<｜end▁of▁sentence｜>"]),
            ("deepseek2", ["<|im_end|>"]),  # Kimi K2
            ("deepseek2", ["<|endoftext|>", "<|user|>", "<|observation|>"]),  # GLM-4.7-Flash
        ],
    )
    def test_ends_that_are_in_the_vocabulary(self, architecture: str, ends: list[str], tmp_path: Path) -> None:
        tokens = ["a", "<|begin_of_text|>", *ends, "b"]
        write_gguf(tmp_path / "tiny.gguf", "llama")
        file = GgufFile(tmp_path / "tiny.gguf")
        file.fields |= {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens}
        assert sorted(_named_ends(Fields(file))) == [2 + i for i in range(len(ends))]

    def test_yarn(self, tmp_path: Path) -> None:
        """As `test_rope_configs` has it, which compares with transformers. Mutant: a plain rope."""
        stretched = {"type": "yarn", "factor": 4, "original_context_length": 32}
        fields = {f"qwen3.rope.scaling.{name}": value for name, value in stretched.items()}
        write_gguf(tmp_path / "tiny.gguf", "qwen3", fields=fields)
        scaling = ModelSpec.from_folder(hub.resolve_model(str(tmp_path / "tiny.gguf"))).rope_scaling
        assert scaling is not None
        expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32.0}
        assert scaling | expected == scaling
        assert (scaling["beta_fast"], scaling["beta_slow"]) == (32.0, 1.0)

    def test_configs_are_written_anew_by_a_version_that_writes_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Mutant: what one version wrote is kept for ever."""
        write_gguf(tmp_path / "tiny.gguf", "llama")
        before = hub.resolve_model(str(tmp_path / "tiny.gguf"))
        monkeypatch.setattr("paceline.models.gguf.folder.CONFIGS", 0)
        assert hub.resolve_model(str(tmp_path / "tiny.gguf")) != before
        assert not before.exists()

    def test_tokenizer_and_files_beside_it(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", pre="llama-bpe")
        tokenizer = Tokenizer.from_folder(hub.resolve_model(str(tmp_path / "tiny.gguf")))
        ids = tokenizer.encode("ab 12")
        assert ids[0] == 1  # llama-bpe begins with the beginning of sequence
        assert tokenizer.decode(ids[1:]) == "ab 12"
        assert len(ids) == 4  # "ab" is a token; " " and "12": up to three digits go together
        write_gguf(tmp_path / "other" / "tiny.gguf", "llama", pre="tekken")
        with pytest.raises(ConfigError, match=r"'tekken'.*smollm"):
            hub.resolve_model(str(tmp_path / "other" / "tiny.gguf"))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            beside = hub.resolve_model(str(tmp_path / "tiny.gguf")) / name
            (tmp_path / "other" / name).write_text(beside.read_text())
        folder = hub.resolve_model(str(tmp_path / "other"))
        assert Tokenizer.from_folder(folder).decode(ids[1:]) == "ab 12"
        file = tmp_path / "other" / "tokenizer.json"
        file.write_text(file.read_text() + " ")  # another one takes its place, and the GGUF file is as it was
        assert (hub.resolve_model(str(tmp_path / "other")) / "tokenizer.json").read_text() == file.read_text()
        write_gguf(tmp_path / "other" / "second.gguf", "llama")
        with pytest.raises(ConfigError, match="2 GGUF files"):
            hub.resolve_model(str(tmp_path / "other"))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"general.architecture": "gemma"}, "architecture 'gemma'"),
            ({"split.count": 3}, "one of 3 files"),
            ({"llama.expert_count": 8}, "experts"),
            ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
            ({"llama.attention.head_count": 0}, r"head_count is 0"),
            ({"llama.block_count": "many"}, r"block_count is 'many'"),
        ],
    )
    def test_refused_by_name(self, change: dict[str, object], named: str, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", fields=change)
        with pytest.raises(ConfigError, match=named):
            hub.resolve_model(str(tmp_path / "tiny.gguf"))

    def test_types_that_nothing_reads(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", kind=Kind.IQ3_S)
        with pytest.raises(ConfigError, match="tensors of IQ3_S, supported are F32"):
            GgufTensors(GgufFile(tmp_path / "tiny.gguf"), torch.float32)

    def test_heads_that_are_no_numbers(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama", fields={"llama.attention.head_count_kv": "two"})
        with pytest.raises(ConfigError, match="'two' heads of attn_k"):
            GgufTensors(GgufFile(tmp_path / "tiny.gguf"), torch.bfloat16)


class TestHostileHeaders:
    def test_fuzz(self, tmp_path: Path) -> None:
        """Truncated, flipped, and counts and lengths beyond all bounds: an error, soon, or a file like any other."""
        write_gguf(tmp_path / "good.gguf", "llama")
        good = (tmp_path / "good.gguf").read_bytes()
        header = GgufFile(tmp_path / "good.gguf").tensors["token_embd.weight"].offset
        dice, refused, began = random.Random(5), 0, time.monotonic()
        for i in range(400):
            data = bytearray(good[: dice.randrange(header)] if i % 4 == 0 else good[: header + 4096 * (i % 2)])
            at = dice.randrange(max(len(data) - 8, 1))
            if i % 4 == 1:
                data[at] ^= 1 << dice.randrange(8)
            elif i % 4 == 2:
                data[at : at + 8] = struct.pack("<Q", dice.choice([0, 1 << 31, 1 << 62, (1 << 64) - 1]))
            (tmp_path / "bad.gguf").write_bytes(data)
            try:
                GgufTensors(GgufFile(tmp_path / "bad.gguf"), torch.bfloat16)
            except ConfigError:
                refused += 1
        assert refused > 300
        assert time.monotonic() - began < 8

    @pytest.mark.parametrize(
        ("edit", "named"),
        [
            (lambda data: data.replace(b"GGUF", b"GGML", 1), "begin with GGUF"),
            (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "version 9"),
            (lambda data: data[:8] + struct.pack("<Q", 1 << 50) + data[16:], "announces"),
            (lambda data: data[:-64], "ends after the file"),
            (lambda data: b"", "cannot mmap an empty file"),
        ],
    )
    def test_named(self, edit: object, named: str, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama")
        data = (tmp_path / "tiny.gguf").read_bytes()
        (tmp_path / "bad.gguf").write_bytes(edit(data))  # type: ignore[operator]
        with pytest.raises(ConfigError, match=named):
            GgufFile(tmp_path / "bad.gguf")

    def test_tensors_over_each_other(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", "llama")
        data = (tmp_path / "tiny.gguf").read_bytes()
        place = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8 + 4
        bad = data[:place] + struct.pack("<Q", 0) + data[place + 8 :]
        (tmp_path / "bad.gguf").write_bytes(bad)
        with pytest.raises(ConfigError, match="lies over another"):
            GgufFile(tmp_path / "bad.gguf")


def test_pre_tokenizers_split_as_the_models_do() -> None:
    """Qwen2 takes digits one by one, Llama 3 up to three; both split before the merges."""
    digits = {name: len(record.make().pre_tokenize_str("a1234")) for name, record in PRE_TOKENIZERS.items()}
    assert digits == {
        "smollm": 5,
        "gpt-2": 2,
        "llama-bpe": 3,
        "llama3": 3,
        "qwen2": 5,
        "deepseek-r1-qwen": 5,
        "gpt-4o": 3,
        "deepseek-v3": 3,
    }
