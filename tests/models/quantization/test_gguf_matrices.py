"""Matrices of GGUF's blocks are read in slices: the same bits, in little more memory than they take, while torch has
one thread."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.gguf import matrices
from paceline.models.gguf.blocks import IN_CODES, KEPT
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.registry import load_target
from paceline.ranks.collective import CollectiveGroup
from paceline.ranks.communicators import torch_dist
from paceline.ranks.load import load_shard
from paceline.ranks.shard import Shard
from tests.support.gguf_experts import write_qwen3moe
from tests.support.gguf_files import HALVES, random_blocks

READER = "paceline.models.gguf.tensors.weight_of_blocks"
WITHOUT_MINIMUMS = [Kind.Q8_0, Kind.Q4_0, Kind.Q5_0, Kind.Q3_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def tensors_of(weight: QuantizedWeight) -> list[torch.Tensor]:
    tables = weight.tables
    every = [weight.codes, weight.scales, weight.minimums]
    every += [] if tables is None else [tables.scales, tables.lowest, tables.scale_steps, tables.lowest_steps]
    return [tensor for tensor in every if tensor is not None]


@pytest.mark.parametrize("kind", KEPT)
def test_scales_are_those_of_the_tables(kind: Kind) -> None:
    """To the last bit. Mutant: minimums of code -8 for those of code 0."""
    weight = weight_of_blocks(random_blocks(kind, 37, 1024, np.random.default_rng(2)), kind)
    assert weight.tables is not None
    scales, minimums = weight.tables.values()
    assert torch.equal(weight.scales, scales)
    assert (weight.minimums is None) == (minimums is None) == (kind in WITHOUT_MINIMUMS)
    if weight.minimums is not None and minimums is not None:
        assert torch.equal(weight.minimums, minimums)


@pytest.mark.parametrize("kind", WITHOUT_MINIMUMS)
def test_numbers_are_ggufs_to_the_last_bit(kind: Kind) -> None:
    """Those with minimums are near: test_gguf. Mutant: a bit of a code or of a scale."""
    rows = random_blocks(kind, 37, 1024, np.random.default_rng(3))
    assert torch.equal(weight_of_blocks(rows, kind).dequantised(), torch.from_numpy(gguf.quants.dequantize(rows, kind)))


@pytest.mark.parametrize("kind", IN_CODES)
def test_slices_change_no_bit(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slice is a shorter one. Mutants: the last one is left out, each slice's codes at the first."""
    random = np.random.default_rng(4)
    rows = random_blocks(kind, 37, 768, random) if kind in KEPT else random.integers(0, 250, (37, 24 * 17), np.uint8)
    whole = weight_of_blocks(rows, kind)
    monkeypatch.setattr(matrices, "SLICE", 2048)
    read = weight_of_blocks(rows, kind)
    assert (read.bits, read.group_size, read.float4) == (whole.bits, whole.group_size, whole.float4)
    assert (read.tables is None) == (whole.tables is None)
    for mine, expected in zip(tensors_of(read), tensors_of(whole), strict=True):
        assert mine.dtype is expected.dtype
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_what_is_no_number(kind: Kind, bits: int) -> None:
    """Kernels read such tables in ways of their own, so numbers are made of them. Mutants: the tables stay; numpy's
    warnings are this process's errors."""
    for at in HALVES[kind]:
        rows = random_blocks(kind, 2, 512, np.random.default_rng(5))
        size = gguf.GGML_QUANT_SIZES[kind][1]
        rows.reshape(-1, size)[-1, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
        assert weight_of_blocks(rows, kind).tables is None


def test_a_slice_is_all_that_is_copied() -> None:
    """Mutant: a slice is the matrix."""
    rows = random_blocks(Kind.Q4_K, 4096, 2048, np.random.default_rng(6))
    weight_of_blocks(rows[:1], Kind.Q4_K)
    tracemalloc.start()
    try:
        weight = weight_of_blocks(rows, Kind.Q4_K)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tables = sum(tensor.nbytes for tensor in tensors_of(weight)[1:])
    assert peak < 1.5 * weight.codes.nbytes + 2 * tables


class TestThreads:
    @pytest.fixture(autouse=True)
    def three(self) -> Any:
        """torch's threads, as a node sets them."""
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        yield
        torch.set_num_threads(before)

    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """torch's threads when each matrix is read."""
        found: list[int] = []

        def noted(*how: Any) -> QuantizedWeight:
            found.append(torch.get_num_threads())
            return weight_of_blocks(*how)

        monkeypatch.setattr(READER, noted)
        return found

    @pytest.mark.parametrize("load", ["whole", "rank"])
    def test_torch_has_one_while_weights_are_taken(self, load: str, tmp_path: Path, seen: list[int]) -> None:
        """Mutants: as many as before; one for ever after."""
        write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q8_0)
        folder, device = hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.device("cpu")
        if load == "whole":
            load_target(folder, torch.bfloat16, device)
        else:
            shard = Shard(ModelSpec.from_folder(folder), 2, 1)
            group = CollectiveGroup(1, 2, device, torch_dist.HashStore, 1.0)  # which nobody joins
            load_shard(folder, torch.bfloat16, device, shard, group)
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3

    def test_it_has_them_again_after_a_file_that_is_refused(self, tmp_path: Path, seen: list[int]) -> None:
        """Mutant: one for ever after."""
        write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q8_0, left_out="ffn_up_exps")
        with pytest.raises(ConfigError, match="is missing"):
            load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, torch.device("cpu"))
        assert set(seen) == {1}
        assert torch.get_num_threads() == 3
