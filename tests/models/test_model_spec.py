"""ModelSpec against the configurations that transformers itself writes, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.models.config import ModelSpec

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def spec_of(folder: Path, **changes: Any) -> ModelSpec:
    """The spec of BASE with ``changes``; a change to ... leaves the key out."""
    raw = {key: value for key, value in (BASE | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelSpec.from_folder(folder)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_reads_what_transformers_writes(tmp_path: Path, family: str, tie: bool) -> None:
    import transformers

    name = family.capitalize()
    shared = {k: v for k, v in BASE.items() if k not in ("architectures", "rope_theta")}
    rope = {"rope_theta": 5000.0, "rope_type": "default"}
    config = getattr(transformers, f"{name}Config")(
        **shared, tie_word_embeddings=tie, rope_parameters=rope, bos_token_id=5
    )
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_folder(tmp_path)
    assert (spec.family, spec.tie_word_embeddings, spec.rope_theta, spec.rope_scaling) == (family, tie, 5000.0, None)
    assert spec.head_dim == getattr(config, "head_dim", 8)
    assert (spec.num_heads, spec.num_kv_heads, spec.num_layers) == (6, 2, 3)
    assert (spec.rms_norm_eps, spec.vocab_size, spec.max_position_embeddings) == (config.rms_norm_eps, 99, 256)
    assert (spec.attention_bias, spec.attention_out_bias, spec.qk_norm) == (family == "qwen2", False, family == "qwen3")
    assert (spec.eos_token_ids, spec.bos_token_id, spec.max_model_len) == ((7,), 5, 256)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_scaling_under_both_names(tmp_path: Path, key: str) -> None:
    inside = {"rope_theta": 5000.0} if key == "rope_parameters" else {}
    outside = {"rope_theta": ...} if key == "rope_parameters" else {}
    spec = spec_of(tmp_path, **{key: LLAMA3 | inside}, **outside)
    assert (spec.rope_theta, spec.rope_scaling) == (5000.0, LLAMA3)


def test_linear_scaling_with_the_old_key(tmp_path: Path) -> None:
    assert spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 4}).rope_scaling == {
        "rope_type": "linear",
        "factor": 4.0,
    }


def test_biases(tmp_path: Path) -> None:
    llama = spec_of(tmp_path, attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = spec_of(tmp_path, architectures=["Qwen2ForCausalLM"], attention_bias=False)
    assert (qwen2.attention_bias, qwen2.attention_out_bias, qwen2.mlp_bias) == (True, False, False)


def test_defaults_that_differ_by_family(tmp_path: Path) -> None:
    assert spec_of(tmp_path, num_key_value_heads=...).num_kv_heads == 6
    assert spec_of(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        spec_of(tmp_path, architectures=["MistralForCausalLM"], num_key_value_heads=...)


def test_sliding_windows_by_layer(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=100)
    assert (spec.windows, spec.max_model_len) == ((100, 100, 100), 256)
    assert (spec.special_attention(101), spec.special_attention(100)) == (True, False)
    assert spec_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=256).windows == ()
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": True}
    assert spec_of(tmp_path, **qwen, layer_types=kinds).windows == (0, 100, 0)
    assert spec_of(tmp_path, **qwen, max_window_layers=1).windows == (0, 100, 100)
    with pytest.raises(ConfigError, match="chunked_attention"):
        spec_of(tmp_path, **qwen, layer_types=["chunked_attention"] * 3)


def test_sliding_window_that_is_switched_off(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100}
    assert spec_of(tmp_path, **qwen).windows == ()


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(7, None, (7,)), (7, 9, (9,)), (7, [9, 11], (9, 11)), ([3, 4], None, (3, 4)), (None, None, ())],
)
def test_end_of_sequence_ids(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert spec_of(tmp_path, eos_token_id=config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM, Mistral"),
        ({"architectures": ...}, "architecture"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": ...}, "hidden_size"),
        ({"vocab_size": "many"}, "many"),
        ({"vocab_size": float("inf")}, "infinity"),
        ({"eos_token_id": "end"}, "end"),
        ({"num_hidden_layers": 1 << 62, "architectures": ["MistralForCausalLM"], "sliding_window": 9}, "num_hidden"),
        ({"max_position_embeddings": 1 << 39}, "max_position_embeddings 549755813888"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -5}, "sliding_window -5"),
    ],
)
def test_refusals_name_the_matter(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        spec_of(tmp_path, **changes)
    assert raised.value.key == "model"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_config_that_is_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelSpec.from_folder(tmp_path)
