"""``paceline plan`` of GGUF files: the bytes that a node, or each of its ranks, holds of tiny ones; bits a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from cluster.commands.cli import app
from paceline.assembly.model_plan import ModelPlan, plan_model
from paceline.assembly.planned_gguf import planned_weight
from paceline.assembly.planned_weights import gpu_bytes, panels_bytes
from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.packed import PackedMatrix
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.gguf.blocks import IN_CODES, KEPT
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.registry import load_target, open_checkpoint
from paceline.ranks.collective import CollectiveGroup
from paceline.ranks.communicators import torch_dist
from paceline.ranks.load import load_shard
from paceline.ranks.shard import Shard
from tests.assembly.test_planned_weights import held, of_layers
from tests.support.gguf_deepseek import write_deepseek2
from tests.support.gguf_experts import write_glm4moe, write_gpt_oss, write_qwen3moe
from tests.support.gguf_files import HIDDEN, WIDE, random_blocks, write_gguf
from tests.support.needs import needs_kernels, needs_triton

COUNT = 16  # experts: kernels pad a router of fewer
EXPERTS: dict[str, tuple[int, ...]] = {
    "ffn_gate_inp": (COUNT, HIDDEN), "ffn_gate_exps": (COUNT, WIDE, HIDDEN), "ffn_up_exps": (COUNT, WIDE, HIDDEN),
    "ffn_down_exps": (COUNT, HIDDEN, WIDE),
}  # fmt: skip
# Columns of o_proj that two ranks part between blocks of 256.
WIDE_HEADS: dict[str, tuple[int, ...]] = {
    "attn_q": (512, HIDDEN), "attn_k": (256, HIDDEN), "attn_v": (256, HIDDEN), "attn_output": (HIDDEN, 512),
}  # fmt: skip
OF_128 = {"attention.key_length": 128, "attention.value_length": 128}
Write = Callable[[Path], Mapping[str, torch.Tensor]]


def moe(kind: Kind, down: Kind | None = None, *, wide: bool = False) -> Write:
    fields = {"expert_count": COUNT} | (OF_128 if wide else {})
    shapes = EXPERTS | (WIDE_HEADS if wide else {})
    return lambda path: write_qwen3moe(path, kind, fields, down=down, shapes=shapes, head_dim=128 if wide else 64)


def of_kind(kind: Kind) -> Write:
    return lambda path: write_gguf(path, "qwen3", kind=kind)


CASES: dict[str, Write] = {
    **{f"qwen3 {kind.name}": of_kind(kind) for kind in KEPT},
    "llama": lambda path: write_gguf(path, "llama"),
    "qwen2": lambda path: write_gguf(path, "qwen2"),
    "experts": moe(Kind.Q4_K, Kind.Q6_K),
    "experts of floats beside codes": moe(Kind.Q8_0, Kind.F16),
    "gpt-oss": lambda path: write_gpt_oss(path, Kind.Q8_0, count=COUNT),
    "glm": lambda path: write_glm4moe(path, Kind.Q5_K, experts=COUNT),
    "deepseek": lambda path: write_deepseek2(path, Kind.Q4_K, experts=COUNT),
    "deepseek, whole": lambda path: write_deepseek2(path, Kind.Q8_0, whole=True, experts=COUNT),
}
ON_RANKS: dict[str, Write] = {
    "qwen3": of_kind(Kind.Q8_0),
    "a block is parted": moe(Kind.Q4_K),
    "a block is parted, no minimums": moe(Kind.Q6_K),
    "no block is parted": moe(Kind.Q4_K, wide=True),
    "nothing has steps": moe(Kind.Q4_1),
    "glm": lambda path: write_glm4moe(path, Kind.Q6_K, experts=COUNT),
    "deepseek": lambda path: write_deepseek2(path, Kind.Q6_K, experts=COUNT),
}
CPU = torch.device("cpu")
ODD_HEADS = {  # whose rows cannot be pairs
    f"llama.attention.{name}": count
    for name, count in {"head_count": 256, "head_count_kv": 128, "key_length": 1, "value_length": 1}.items()
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPlan:
    """It reads no weights."""
    with monkeypatch.context() as watched:
        watched.setattr(GgufFile, "rows", None)
        return plan_model(path, torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_a_node_holds_what_is_planned(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the table, as floats, and codes of the head. Mutants: steps as float32 scales; unlike codes that are
    multiplied at once counted apart; the table in codes; norms of gpt-oss in bf16; minimums that nobody has."""
    CASES[case](tmp_path / "tiny.gguf")
    plan = planned(tmp_path / "tiny.gguf", monkeypatch)
    model: Any = load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, CPU)
    layers = [*model.layers, model.norm]
    assert of_layers(plan) == sum(held(layers, {}).values())
    assert plan.weight_bytes() == sum(held([*layers, model.embedding, model.lm_head], {}).values())
    assert plan.refusals == ()


@needs_kernels
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ON_RANKS)
def test_a_rank_holds_what_is_planned(case: str, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a block of 256 whose columns two ranks part still has its steps; one that they do not part has none."""
    ON_RANKS[case](tmp_path / "tiny.gguf")
    plan = planned(tmp_path / "tiny.gguf", monkeypatch)
    plan.check_degree(2)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    group = CollectiveGroup(rank, 2, CPU, torch_dist.HashStore, 1.0)  # which nobody joins
    model: Any = load_shard(folder, torch.bfloat16, CPU, Shard(ModelSpec.from_folder(folder), 2, rank), group)
    expected = sum(p.of_rank(2, first=rank == 0) for p in plan.parts if p.name != "embedding and LM head")
    found = held([*model.layers, model.norm], {}).values()
    assert expected == sum(num_bytes for num_bytes in found if num_bytes > 8)  # where the other rank's tokens begin


@needs_kernels
@pytest.mark.parametrize("kind", IN_CODES)
@pytest.mark.parametrize("shape", [(64, 1024), (40, 512), (33, 256)])
def test_a_matrix_takes_what_is_planned(kind: Kind, shape: tuple[int, int]) -> None:
    """Mutant: rows that fill no panel of 32 not padded."""
    random, library = np.random.default_rng(3), load_kernels()
    assert library is not None
    rows = random_blocks(kind, *shape, random) if kind in KEPT else np.full((shape[0], shape[1] // 32 * 17), 120, "u1")
    packed = PackedMatrix(library, weight_of_blocks(rows, kind), None).packed
    assert panels_bytes(planned_weight(kind, *shape), halves=kind not in KEPT) == packed.numel()


BITS = {
    Kind.Q8_0: 8.5, Kind.Q4_0: 4.5, Kind.Q4_1: 5, Kind.Q5_0: 6.5, Kind.Q5_1: 7, Kind.Q2_K: 5.125, Kind.Q3_K: 4.5625,
    Kind.Q4_K: 4.625, Kind.Q5_K: 6.625, Kind.Q6_K: 6.5625, Kind.IQ4_NL: 8.5, Kind.IQ4_XS: 8.3125,
    Kind.MXFP4: 4.5,
}  # fmt: skip
ON_A_GPU = {Kind.Q8_0: 9, Kind.Q4_0: 5, Kind.Q4_K: 6, Kind.Q6_K: 10, Kind.MXFP4: 16}


@pytest.mark.parametrize("kind", IN_CODES)
def test_bits_of_a_weight(kind: Kind) -> None:
    """An expert of Qwen3-30B-A3B."""
    weight = planned_weight(kind, 768, 2048)
    assert weight.codes.is_meta
    on_cpu, on_gpu = panels_bytes(weight, halves=kind not in KEPT), gpu_bytes(weight, torch.bfloat16)
    assert 8 * on_cpu / (768 * 2048) == BITS[kind]
    assert 8 * on_gpu / (768 * 2048) == ON_A_GPU.get(kind, 8 * on_gpu / (768 * 2048))


@needs_triton
@pytest.mark.parametrize("case", ["llama", "qwen3 Q2_K", "experts"])
def test_a_gpu_holds_what_is_planned(case: str, tmp_path: Path) -> None:
    """Mutant: codes of four bits as bytes."""
    from paceline.layers.exact_products import Matrices

    CASES[case](tmp_path / "tiny.gguf")
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    kinds = {tensor.kind for tensor in GgufFile(folder / "model.gguf").tensors.values()} & {*IN_CODES}
    assert kinds
    for name, weight in open_checkpoint(folder, torch.bfloat16).items():
        if isinstance(weight, QuantizedWeight):
            made = Matrices.of(weight)
            tensors = (made.values, made.scales, made.minimums)
            assert gpu_bytes(weight, torch.bfloat16) == sum(t.nbytes for t in tensors if t is not None), name
    plan = plan_model(folder, torch.bfloat16, on_gpu=True)
    assert plan.weight_bytes() > plan_model(folder, torch.bfloat16).weight_bytes()  # scales are float32


def test_a_folder_with_a_file(tmp_path: Path) -> None:
    """As ``serve`` takes it. Mutant: files alone are planned."""
    write_qwen3moe(tmp_path / "own" / "tiny.gguf", Kind.Q4_K)
    plan = plan_model(tmp_path / "own" / "tiny.gguf", torch.bfloat16)
    assert plan == plan_model(tmp_path / "own", torch.bfloat16)
    assert plan == plan_model(hub.resolve_model(str(tmp_path / "own")), torch.bfloat16)


def test_the_command(tmp_path: Path) -> None:
    write_qwen3moe(tmp_path / "tiny.gguf", Kind.Q4_K)
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "tiny.gguf"), "--tp", "2"])
    assert done.exit_code == 0, done.output
    assert "qwen3_moe: 45 tensors, each taken once" in done.output
    assert "every other rank" in done.output


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (lambda path: write_gguf(path, "gemma"), "architecture 'gemma'"),
        (lambda path: write_gguf(path, "llama", kind=Kind.IQ3_S), "tensors of IQ3_S"),
        (lambda path: write_gguf(path, "llama", pre="tekken"), "'tekken'"),
        (lambda path: write_gguf(path, "llama", fields=ODD_HEADS), "attn_q.weight has 256 rows for 256 heads"),
        (lambda path: write_qwen3moe(path, Kind.Q8_0, left_out="ffn_up_exps"), "up_proj.weight is missing"),
        (lambda path: write_gpt_oss(path, Kind.Q8_0, up=Kind.Q8_0), "are multiplied together"),
        (lambda path: write_deepseek2(path, Kind.Q8_0, {"expert_gating_func": 1}), "expert_gating_func 1"),
        (lambda path: write_deepseek2(path, Kind.Q8_0, left_out="attn_v_b"), "attn_k_b.weight is one part of two"),
        (lambda path: path.write_bytes(b"GGUF"), "is not a GGUF file"),
    ],
)
def test_what_a_node_would_refuse(write: Write, named: str, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=named):
        plan_model(tmp_path / "tiny.gguf", torch.bfloat16)


def test_no_file(tmp_path: Path) -> None:
    """Mutant: it is looked for on the hub."""
    with pytest.raises(ConfigError, match="is no model folder, no GGUF file"):
        plan_model(tmp_path / "tiny.gguf", torch.bfloat16)
