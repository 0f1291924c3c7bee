"""GGUF files of DeepSeek-V3: latent attention whose kv_b_proj lies whole or in two parts, yarn with a multiplier, and
experts in groups, against transformers; files of DeepSeek-V2 are refused."""

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
from paceline.models.gguf.tokenizer import PRE_TOKENIZERS
from paceline.models.registry import load_target, open_checkpoint
from paceline.text.tokenizer import Tokenizer
from tests.models.quantization.test_gguf_experts import (
    STRETCHED,
    YARN,
    check_drafts_batches_and_chunks,
    check_logits,
    check_ranks,
    theirs,
    written_folder,
)
from tests.support.gguf_deepseek import (
    DENSE,
    EXPERTS,
    GROUPS,
    LAYERS,
    NOPE,
    RANK,
    ROPE,
    SHARED,
    VALUE,
    WHOLE,
    write_deepseek2,
)
from tests.support.gguf_experts import FLOATS, USED, ExpertFile, shape_fields
from tests.support.gguf_files import HEADS, HIDDEN, VOCAB, WIDE
from tests.support.needs import needs_kernels

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
DEEPSEEK: dict[str, Any] = {  # what the file is, by hand
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 3 * WIDE, "moe_intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": RANK,
    "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
    "n_routed_experts": EXPERTS, "n_shared_experts": SHARED, "num_experts_per_tok": USED, "n_group": GROUPS,
    "topk_group": 2, "first_k_dense_replace": DENSE, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "rope_interleave": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
Fields = dict[str, Any]
TURNED = {"attn_k_b": (HEADS, RANK, VALUE), "attn_v_b": (HEADS, NOPE, RANK)}  # as many rows in all
ONE_QUERY: Fields = {"q_lora_rank": None}
SHARP: Fields = YARN | {"rope.scaling.yarn_log_multiplier": 0.1}
LESS_SHARP: Fields = YARN | {"rope.scaling.yarn_log_multiplier": 0.0707}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own; the kernels stay where they are compiled."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def stretched(**sharpness: float) -> dict[str, Any]:
    return {"rope_parameters": STRETCHED | sharpness}


CASES: dict[str, tuple[Kind, bool, Fields, Fields]] = {  # type, whether kv_b_proj is whole, fields, config
    "floats": (Kind.F16, False, {}, {}),
    "floats, whole": (Kind.F32, True, {}, {}),
    "bf16": (Kind.BF16, False, {}, {}),
    "codes": (Kind.Q4_K, False, {}, {}),
    "codes, whole": (Kind.Q4_K, True, {}, {}),
    "codes of 8 bits": (Kind.Q8_0, False, {}, {}),
    "queries projected once": (Kind.F16, False, {}, ONE_QUERY),
    "not normalised": (Kind.F16, False, {"expert_weights_norm": None}, {"norm_topk_prob": False}),
    "no scale": (Kind.F16, False, {"expert_weights_scale": None}, {"routed_scaling_factor": 1.0}),
    "no groups": (Kind.F16, False, {"expert_group_count": None}, {"n_group": 1, "topk_group": 1}),
    "yarn": (Kind.F16, False, SHARP, stretched(mscale=1.0, mscale_all_dim=1.0)),
    "yarn, less sharp": (Kind.F16, True, LESS_SHARP, stretched(mscale=0.707, mscale_all_dim=0.707)),
    "yarn without a multiplier": (Kind.F16, False, YARN, stretched()),
}


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_logits_of_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: rope's rows taken for halves; keys not turned over; keys after values; no factor of the experts, no
    bias, no groups; yarn without its multiplier, or with ten times too little."""
    kind, whole, fields, changes = CASES[case]
    query_rank = changes is not ONE_QUERY
    if "expert_group_count" in fields:
        fields = fields | {"expert_group_used_count": None}
    meant = write_deepseek2(tmp_path / "tiny.gguf", kind, fields, whole=whole, query_rank=query_rank)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    check_logits(folder, theirs(tmp_path / "theirs", "DeepseekV3", DEEPSEEK | changes, meant), monkeypatch)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("kind", [*FLOATS, Kind.Q4_K])
def test_each_weight_is_what_the_file_means(kind: Kind, whole: bool, tmp_path: Path) -> None:
    """Mutants: the correction in bf16; the parts of kv_b_proj as they lie; up's experts for gate's."""
    meant = write_deepseek2(tmp_path / "tiny.gguf", kind, whole=whole)
    found = open_checkpoint(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16)
    assert set(found) == set(meant)
    for name, weight in meant.items():
        mine = found[name]
        assert isinstance(mine, QuantizedWeight) == _in_codes(name, weight, kind, whole), name
        if isinstance(mine, QuantizedWeight):
            assert torch.allclose(mine.dequantised(), weight, rtol=1e-6, atol=1e-6), name
        else:
            exact = name.endswith("e_score_correction_bias")
            assert torch.equal(mine, weight if exact else weight.bfloat16()), name


def _in_codes(name: str, weight: torch.Tensor, kind: Kind, whole: bool) -> bool:
    floats = name.endswith("mlp.gate.weight") or ("kv_b_proj" in name and not whole)
    return kind not in FLOATS and weight.dim() == 2 and not floats


@needs_kernels
def test_modules_stay_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As files of GLM-4.7-Flash have them. Mutant: the module is a layer of the model."""
    meant = write_deepseek2(tmp_path / "tiny.gguf", Kind.F16, modules=1)
    folder = hub.resolve_model(str(tmp_path / "tiny.gguf"))
    spec = ModelSpec.from_folder(folder)
    assert (spec.num_layers, spec.num_mtp_modules) == (LAYERS, 0)
    assert set(open_checkpoint(folder, torch.bfloat16)) == set(meant)
    check_logits(folder, theirs(tmp_path / "theirs", "DeepseekV3", DEEPSEEK, meant), monkeypatch)


def test_a_whole_folder(tmp_path: Path) -> None:
    """In bf16, with kv_b_proj in one piece and the correction in float32."""
    meant = write_deepseek2(tmp_path / "tiny.gguf", Kind.F16)
    folder = tmp_path / "folder"
    written = written_folder(tmp_path / "tiny.gguf", folder)
    assert set(written) == set(meant)
    for name in ("self_attn.kv_b_proj.weight", "mlp.gate.e_score_correction_bias"):
        weight = meant[f"model.layers.1.{name}"]
        assert torch.equal(written[f"model.layers.1.{name}"], weight if "bias" in name else weight.bfloat16().float())
    load_target(folder, torch.bfloat16, torch.device("cpu"))


@needs_kernels
def test_drafts_batches_and_chunks_change_no_bit(tmp_path: Path) -> None:
    write_deepseek2(tmp_path / "tiny.gguf", Kind.Q4_K)
    check_drafts_batches_and_chunks(tmp_path / "tiny.gguf")


def test_ranks_share_the_heads(tmp_path: Path) -> None:
    """Mutant: each rank has the first heads of kv_b_proj."""
    write_deepseek2(tmp_path / "tiny.gguf", Kind.Q8_0)
    check_ranks(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, (8, 4)), ({"expert_group_count": 1}, (1, 1)), ({"block_count": 60}, (1, 1)), ({"expert_count": 384}, (1, 1))],
)
def test_groups_of_files_that_do_not_say(changes: Fields, expected: tuple[int, int], tmp_path: Path) -> None:
    """Those of DeepSeek-V3 and R1 before llama.cpp had groups; Kimi K2 has none. Mutant: a file's own word is passed
    over."""
    fields: dict[str, Any] = {
        "block_count": 61, "expert_count": 256, "expert_used_count": 8, "expert_shared_count": 1,
        "expert_gating_func": 2, "attention.key_length": NOPE + ROPE, "attention.value_length": VALUE,
        "attention.kv_lora_rank": RANK, "rope.dimension_count": ROPE, "leading_dense_block_count": 3,
    }  # fmt: skip
    file = ExpertFile(tmp_path / "tiny.gguf", "deepseek2", shape_fields(fields | changes), 1)
    file.add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), Kind.F16)
    file.close("deepseek-v3")
    moe = ModelSpec.from_folder(hub.resolve_model(str(tmp_path / "tiny.gguf"))).moe
    assert moe is not None
    assert (moe.num_groups, moe.top_groups) == expected


def test_text_is_split_as_the_model_does(tmp_path: Path) -> None:
    """By the patterns of its tokenizer.json. Mutants: digits one by one; a word's mark apart from it."""
    text = "Hi, all 12345 #include 日本語と don't\n\n x²"
    pieces = ["Hi", ",", " all", " ", "123", "45", " #", "include", " ", "日本語と", " don", "'t", "\n\n", " x", "²"]
    found = PRE_TOKENIZERS["deepseek-v3"].make().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == pieces
    write_deepseek2(tmp_path / "tiny.gguf", Kind.F16)
    tokenizer = Tokenizer.from_folder(hub.resolve_model(str(tmp_path / "tiny.gguf")))
    assert tokenizer.decode(tokenizer.encode(text)) == text


REFUSED: list[tuple[Fields, str]] = [
    ({"expert_gating_func": None}, "expert_gating_func None is not supported .2, a sigmoid"),
    ({"expert_gating_func": 1}, "expert_gating_func 1 is not supported .* DeepSeek-V2 has a softmax"),
    ({"expert_gating_func": 0}, "expert_gating_func 0 is not supported"),
    ({"expert_gating_func": 3}, "expert_gating_func 3 is not supported"),
    ({"attention.kv_lora_rank": None}, "deepseek2.attention.kv_lora_rank is None, expected a number"),
    ({"rope.dimension_count": None}, "deepseek2.rope.dimension_count is None, expected a number"),
    ({"rope.dimension_count": 15}, "rope.dimension_count is 15, expected an even number"),
    ({"attention.value_length_mla": None}, "value_length_mla is None, expected a number"),
    ({"attention.key_length_mla": ROPE}, "heads of 16 elements, of which rope turns 16, are not supported"),
    ({"expert_count": None}, "deepseek2.expert_count is None, expected a number"),
    ({"expert_feed_forward_length": None}, "deepseek2.expert_feed_forward_length is None"),
    ({"expert_group_count": 3}, "n_group 3 does not divide n_routed_experts 8"),
    ({"attention.temperature_scale": 0.1}, "attention.temperature_scale is not supported"),
    (SHARP | {"rope.scaling.yarn_log_multiplier": "much"}, "yarn_log_multiplier is 'much', expected a number"),
    (SHARP | {"rope.scaling.yarn_attn_factor": 1.0}, "yarn_attn_factor 1.0 is not supported"),
    ({"attention.key_length_mla": NOPE + ROPE + 2}, r"blk.0.attn_k_b.weight has shape \(4, 256, 32\), expected"),
    ({"attention.value_length_mla": VALUE + 2}, r"blk.0.attn_v_b.weight has shape \(4, 64, 256\), expected"),
    ({"attention.q_lora_rank": None}, "self_attn.q_proj.weight is missing"),
    ({"leading_dense_block_count": 0}, "model.layers.0.mlp.gate.weight is missing"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_refused_by_its_fields(fields: Fields, named: str, tmp_path: Path) -> None:
    write_deepseek2(tmp_path / "tiny.gguf", Kind.Q8_0, fields)
    with pytest.raises(ConfigError, match=named):
        load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("left_out", "shapes", "named"),
    [
        ("attn_k_b", {}, "blk.1.attn_v_b.weight is one part of two"),
        ("attn_v_b", {}, "blk.1.attn_k_b.weight is one part of two"),
        ("", WHOLE, "blk.0.attn_k_b.weight is a part of a projection that is there as a whole too"),
        ("", {"attn_k_b": (HEADS * RANK, NOPE)}, r"attn_k_b.weight has shape \(1024, 32\), expected \(4, 256, 32\)"),
        ("", TURNED, r"attn_k_b.weight has shape \(4, 256, 64\), expected \(4, 256, 32\)"),
        ("attn_kv_a_mqa", {}, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight is missing"),
        ("exp_probs_b", {}, "model.layers.1.mlp.gate.e_score_correction_bias is missing"),
    ],
)
def test_refused_by_its_tensors(left_out: str, shapes: dict[str, tuple[int, ...]], named: str, tmp_path: Path) -> None:
    write_deepseek2(tmp_path / "tiny.gguf", Kind.Q8_0, left_out=left_out, shapes=shapes)
    with pytest.raises(ConfigError, match=named):
        load_target(hub.resolve_model(str(tmp_path / "tiny.gguf")), torch.bfloat16, torch.device("cpu"))
