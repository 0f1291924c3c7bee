"""GGUF files of GLM-4.5: dense first layers, shared experts, a sigmoid for each expert, and a rope of half a head,
against transformers; MTP modules stay in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from paceline.errors import ConfigError
from paceline.layers.build import load_kernels
from paceline.layers.quantized import QuantizedWeight
from paceline.models import hub
from paceline.models.config import ModelSpec
from paceline.models.registry import load_target, open_checkpoint
from tests.models.quantization.test_gguf_experts import (
    STRETCHED,
    YARN,
    check_drafts_batches_and_chunks,
    check_logits,
    check_ranks,
    theirs,
    written_folder,
)
from tests.support.gguf_experts import (
    EXPERTS,
    GLM_DENSE,
    GLM_LAYERS,
    SHARED,
    USED,
    ExpertFile,
    Fields,
    shape_fields,
    write_glm4moe,
)
from tests.support.gguf_files import DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, WIDE
from tests.support.needs import needs_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
GLM: dict[str, Any] = {  # what the file is, by hand
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 3 * WIDE, "moe_intermediate_size": WIDE,
    "num_hidden_layers": GLM_LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
    "n_routed_experts": EXPERTS, "n_shared_experts": SHARED, "num_experts_per_tok": USED, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": GLM_DENSE, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": True,
    "use_qk_norm": True, "num_nextn_predict_layers": 0, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


CASES: dict[str, tuple[Kind, Fields, dict[str, Any]]] = {
    "floats": (Kind.F16, {}, {}),
    "codes": (Kind.Q4_K, {}, {}),
    "codes of 8 bits": (Kind.Q8_0, {}, {}),
    "not normalised": (Kind.F16, {"expert_weights_norm": False}, {"norm_topk_prob": False}),
    "no scale": (Kind.F16, {"expert_weights_scale": 0.0}, {"routed_scaling_factor": 1.0}),
    "groups": (Kind.F16, {"expert_group_count": 2, "expert_group_used_count": 1}, {"n_group": 2}),
    "a whole rope": (Kind.F16, {"rope.dimension_count": DIM}, {"rope_parameters": ROPE | {"partial_rotary_factor": 1}}),
    "yarn": (Kind.F16, YARN, {"rope_parameters": ROPE | STRETCHED}),
}


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: no shared experts, one of them, no correction of the scores, no dense layer, a rope of whole heads, the
    norm after attention for that of the heads, no biases."""
    kind, fields, changes = CASES[case]
    meant = write_glm4moe(tmp_path / "tiny.gguf", kind, fields)
    config = GLM | {"rope_parameters": ROPE} | changes
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    check_logits(folder, theirs(tmp_path / "theirs", "Glm4Moe", config, meant), monkeypatch)


@needs_kernels
def test_modules_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: the module is a layer of the model; it is asked for."""
    meant = write_glm4moe(tmp_path / "tiny.gguf", Kind.F16, modules=1, qk_norm=False)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    spec = ModelSpec.from_folder(folder)
    assert (spec.num_layers, spec.num_mtp_modules, spec.qk_norm, spec.rotary_dim) == (GLM_LAYERS, 0, False, DIM // 2)
    assert set(open_checkpoint(folder, torch.bfloat16)) == set(meant)
    config = GLM | {"rope_parameters": ROPE, "use_qk_norm": False}
    check_logits(folder, theirs(tmp_path / "theirs", "Glm4Moe", config, meant), monkeypatch)


def test_a_layer_too_many_is_named(tmp_path: Path) -> None:
    """Mutant: whatever comes after the last layer is of a module."""
    fields = {"nextn_predict_layers": 1, "block_count": GLM_LAYERS + 1}
    write_glm4moe(tmp_path / "tiny.gguf", Kind.F16, fields, modules=2)
    with pytest.raises(ConfigError, match=r"blk\.4\.nextn\.eh_proj\.weight is not one of"):
        open_checkpoint(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16)


def test_each_weight_is_what_the_file_means(tmp_path: Path) -> None:
    """Mutants: the correction in bf16, gate's shared experts for up's."""
    meant = write_glm4moe(tmp_path / "tiny.gguf", Kind.Q4_K)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    found = open_checkpoint(folder, torch.bfloat16)
    assert set(found) == set(meant)
    for name, weight in meant.items():
        mine = found[name]
        if isinstance(mine, QuantizedWeight):
            assert torch.allclose(mine.dequantised(), weight, rtol=1e-6, atol=1e-6), name
        else:
            exact = name.endswith("e_score_correction_bias")
            assert torch.equal(mine, weight if exact else weight.bfloat16()), name


def test_a_whole_folder_keeps_the_correction(tmp_path: Path) -> None:
    """Mutant: it is written in bf16."""
    meant = write_glm4moe(tmp_path / "tiny.gguf", Kind.F16)
    folder = tmp_path / "folder"
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(written_folder(tmp_path / "tiny.gguf", folder)[name], meant[name])
    load_target(folder, torch.bfloat16, torch.device("cpu"))


@needs_kernels
def test_drafts_batches_and_chunks_change_no_bit(tmp_path: Path) -> None:
    write_glm4moe(tmp_path / "tiny.gguf", Kind.Q4_K)
    check_drafts_batches_and_chunks(tmp_path / "tiny.gguf")


def test_ranks_share_the_shared_experts(tmp_path: Path) -> None:
    write_glm4moe(tmp_path / "tiny.gguf", Kind.Q8_0)
    check_ranks(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"expert_gating_func": 1}, "expert_gating_func 1 is not supported"),
        ({"expert_group_count": 3}, "n_group 3 does not divide n_routed_experts 4"),
        ({"expert_shared_count": 1.5}, "expert_shared_count is 1.5, expected a whole number"),
        ({"expert_shared_count": SHARED + 1}, r"shared_experts.gate_proj.weight has shape \(512, 256\), expected"),
        ({"nextn_predict_layers": GLM_LAYERS}, "nextn_predict_layers is 3 of 3 blocks"),
        ({"block_count": GLM_LAYERS - 1}, "does not know: .*model.layers.2"),
        ({"rope.dimension_count": DIM + 2}, "heads of which rope turns a part"),
        ({"rope.dimension_count": 31}, "heads of which rope turns a part"),
        ({"leading_dense_block_count": 2}, "model.layers.1.mlp.gate_proj.weight is missing"),
    ],
)
def test_refused(fields: Fields, named: str, tmp_path: Path) -> None:
    write_glm4moe(tmp_path / "tiny.gguf", Kind.Q8_0, fields)
    with pytest.raises(ConfigError, match=named):
        load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(("architecture", "named"), [("llama", "experts are not supported"), ("qwen2moe", "qwen2moe")])
def test_families_that_are_not_here(architecture: str, named: str, tmp_path: Path) -> None:
    """Mixtral, and Qwen2-MoE with a gate for its shared expert: neither is among the families."""
    file = ExpertFile(tmp_path / "tiny.gguf", architecture, shape_fields({}), 1)
    file.add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), Kind.F16)
    file.close()
    with pytest.raises(ConfigError, match=named):
        hub.resolve_model(str(tmp_path / "tiny.gguf"))
