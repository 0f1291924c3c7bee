"""Loading by family: DeepSeek's folder with its MTP modules, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError
from paceline.models.config import ModelSpec
from paceline.models.deepseek_config import MlaSpec
from paceline.models.deepseek_v3 import DeepseekV3Model, softmax_scale
from paceline.models.moe import MoeMlp
from paceline.models.moe_config import MoeSpec
from paceline.models.registry import holds_mtp, load_target
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_deepseek import FOLDER_VOCAB, tiny_deepseek_spec, write_folder

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny-deepseek")


def change_config(folder: Path, **changes: Any) -> None:
    """Edit config.json; a change to ... leaves the key out."""
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | changes, file)


def test_spec_of_the_folder(folder: Path) -> None:
    spec, expected = ModelSpec.from_folder(folder), tiny_deepseek_spec(FOLDER_VOCAB)
    assert (spec.mla, spec.moe, spec.num_mtp_modules) == (expected.mla, expected.moe, 2)
    assert spec.rope_scaling == (expected.rope_scaling or {}) | {"truncate": True}
    assert (spec.head_dim, spec.max_model_len, spec.eos_token_ids) == (16, 512, (257,))


def test_spec_of_the_released_model(tmp_path: Path) -> None:
    """The numbers of DeepSeek-V3's own config.json."""
    raw = {
        "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    spec = ModelSpec.from_folder(tmp_path)
    assert spec.mla == MlaSpec(1536, 512, 128, 64, 128, True)
    assert spec.mla.latent_dim == 576
    assert spec.moe == MoeSpec(3, 256, 1, 2048, 8, 8, 4, True, 2.5)
    assert (spec.head_dim, spec.num_mtp_modules, spec.max_model_len) == (64, 1, 163840)
    assert softmax_scale(spec) == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-4)


def test_target_leaves_its_mtp_modules(folder: Path) -> None:
    model = load_target(folder, torch.bfloat16, CPU)
    assert isinstance(model, DeepseekV3Model)
    assert [layer.row_elems for layer in model.kv_layers] == [64] * 3
    assert holds_mtp(folder, model.spec)


def test_correction_bias_keeps_float32(folder: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = torch.linspace(7.001, 7.002, 8)  # one value in bf16
    change_tensors(folder, {name: stored})
    model = load_target(folder, torch.bfloat16, CPU)
    assert isinstance(model, DeepseekV3Model)
    mlp = model.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    assert mlp.bias is not None
    assert torch.equal(mlp.bias, stored)


def test_a_checkpoint_may_lack_its_modules(folder: Path) -> None:
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if ".layers.3." not in n}
    save_file({n: t.clone() for n, t in tensors.items()}, folder / "model.safetensors")
    assert not holds_mtp(folder, ModelSpec.from_folder(folder))


def test_layers_that_the_config_does_not_announce_are_refused(folder: Path) -> None:
    change_config(folder, num_nextn_predict_layers=0)
    assert not holds_mtp(folder, ModelSpec.from_folder(folder))
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.3"):
        load_target(folder, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"n_group": 3}, "n_group 3"),
        ({"n_group": 8}, "fewer than 2"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({"num_nextn_predict_layers": 9}, "num_nextn_predict_layers 9"),
        ({"kv_lora_rank": ...}, "kv_lora_rank"),
        ({"q_lora_rank": ...}, "q_lora_rank"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}}, "dynamic"),
    ],
)
def test_refusals_name_the_matter(folder: Path, changes: dict[str, Any], named: str) -> None:
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=named):
        load_target(folder, torch.bfloat16, CPU)


def test_fp8_weights_without_a_word_in_the_config_are_refused(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})
    with pytest.raises(ConfigError, match=r"o_proj\.weight_scale_inv is of a quantised"):
        load_target(folder, torch.bfloat16, CPU)


def test_yarn_is_refused_for_gemma(tmp_path: Path) -> None:
    raw = {
        "architectures": ["Gemma3ForCausalLM"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 16},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"yarn.*gemma3"):
        ModelSpec.from_folder(tmp_path)


def test_tokenizer_of_the_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("Grüße, 日本!")
    assert ids[0] == 256
    assert tokenizer.decode(ids[1:]) == "Grüße, 日本!"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
