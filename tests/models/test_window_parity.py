"""Models with sliding windows and sinks against transformers: tiny random checkpoints of Mistral, Qwen2, Gemma 3 and
gpt-oss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.assembly.build import build_runner
from paceline.assembly.model_plan import EVERYWHERE, plan_model
from paceline.config import NodeConfig
from paceline.layers.linear import Linear
from paceline.layers.quantized import QuantizedWeight
from paceline.models.config import ModelSpec
from paceline.models.gpt_oss import ExpertWeights, mxfp4_weight
from paceline.models.registry import load_target
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.parity import VOCAB, logits_of, worst_difference, write_reference
from tests.support.tiny_model import tiny_request

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    needs_kernels,
]

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "sliding_window": 8,
}
GEMMA = SHAPE | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
    "pad_token_id": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}
STRETCHED = {**GEMMA["rope_parameters"], "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}}
OSS = SHAPE | {
    "intermediate_size": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", SHAPE),
    "qwen2, upper layers": ("Qwen2", SHAPE | {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma": ("Gemma3", GEMMA),
    "gemma, stretched": ("Gemma3", GEMMA | {"rope_parameters": STRETCHED}),
    "gemma, windows beyond the context": ("Gemma3", GEMMA | {"sliding_window": 512}),
    "gemma, wide heads": ("Gemma3", GEMMA | {"head_dim": 256, "num_key_value_heads": 1}),
    "gpt-oss": ("GptOss", OSS),
}


@pytest.mark.parametrize("case", CASES)
def test_tiny_checkpoints(case: str, tmp_path: Path) -> None:
    expected = write_reference(tmp_path, *CASES[case])
    assert worst_difference(tmp_path, expected) < 1e-4
    assert expected.std() > 0.3  # the comparison is of something


@pytest.mark.parametrize("case", ["mistral", "gemma", "gpt-oss"])
def test_a_plan_counts_norms_as_they_are_held(case: str, tmp_path: Path) -> None:
    """Mutants: norms of each family counted as bf16, or as float32."""
    write_reference(tmp_path, *CASES[case])
    model: Any = load_target(tmp_path, torch.bfloat16, torch.device("cpu"))
    (planned,) = [part.num_bytes for part in plan_model(tmp_path, torch.bfloat16).parts if part.name == EVERYWHERE]
    tensors = load_file(tmp_path / "model.safetensors")
    norms = sum(tensor.numel() for name, tensor in tensors.items() if "norm" in name)
    routers = sum(tensor.numel() for name, tensor in tensors.items() if ".router." in name or name.endswith("sinks"))
    assert planned == norms * model.norm.element_size() + 4 * routers


@pytest.mark.parametrize(
    "mutant",
    [
        lambda spec: replace(spec, local_rope_theta=spec.rope_theta, rope_theta=spec.local_rope_theta),
        lambda spec: replace(spec, windows=tuple(9 if window else 0 for window in spec.windows)),
    ],
)
def test_mutants_are_noticed(mutant: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rope bases swapped, a window off by one."""
    expected = write_reference(tmp_path, *CASES["gemma"])
    good = ModelSpec.from_folder(tmp_path)
    monkeypatch.setattr(ModelSpec, "from_folder", lambda folder: mutant(good))
    assert worst_difference(tmp_path, expected) > 1e-2


def write_mxfp4(plain: Path, into: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of gpt-oss with other experts, in MXFP4, which are put into ``plain`` as floats. Returns its
    tensors."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_reference(plain, "GptOss", OSS)
    tensors = load_file(plain / "model.safetensors")
    packed, generator = dict(tensors), torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = packed.pop(name).shape
        blocks = torch.randint(256, (experts, out, width // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(121, 126, blocks.shape[:-1], generator=generator).to(torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        ours = torch.stack([mxfp4_weight(b, s).dequantised() for b, s in zip(blocks, scales, strict=True)])
        tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert torch.equal(ours.bfloat16().transpose(1, 2), tensors[name])
    config = (plain / "config.json").read_text()
    into.mkdir()
    quantised = config.rstrip()[:-1] + ', "quantization_config": {"quant_method": "mxfp4"}}'
    (into / "config.json").write_text(quantised)
    save_file(packed, into / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    return packed


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """Against transformers' own reader, and a checkpoint of them against the same weights as floats. Kernels take half
    a byte for each of them, and a scale of two for 32."""
    packed = write_mxfp4(tmp_path / "plain", tmp_path / "packed")
    models = [load_target(tmp_path / name, torch.float32, torch.device("cpu")) for name in ("plain", "packed")]
    plain, in_codes = (logits_of(model, (45,)) for model in models)
    torch.testing.assert_close(in_codes, plain, rtol=1e-4, atol=1e-4)
    of_layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in packed.items()}
    down = ExpertWeights(of_layer.__getitem__, True, torch.float32).down(0)
    assert isinstance(down, QuantizedWeight)
    whole_panels = -(-down.shape[0] // 32) * 32 * down.shape[1]
    assert Linear(down)._packed.nbytes == whole_panels * (1 / 2 + 2 / 32)


def test_experts_of_floats_are_rounded_with_the_rest(tmp_path: Path) -> None:
    """Mutants: experts stay floats; the rows of up are those of gate."""
    write_reference(tmp_path, *CASES["gpt-oss"])
    model = load_target(tmp_path, torch.float32, torch.device("cpu"), "w8a16")
    assert model.layers[0].mlp.experts._dealt._experts[0].gate_up_proj._packed.dtype is torch.uint8  # type: ignore[attr-defined]
    tensors = load_file(tmp_path / "model.safetensors")
    of_layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in tensors.items()}
    gate_up = ExpertWeights(of_layer.__getitem__, False, torch.float32, "w8a16").gate_up(1)
    for first, part in enumerate(gate_up):
        assert isinstance(part, QuantizedWeight)
        exact = of_layer["mlp.experts.gate_up_proj"][1].t()[first::2]
        assert ((part.dequantised() - exact).abs() <= 0.51 * part.scales).all()


@pytest.mark.parametrize("case", ["gemma", "gpt-oss", "gpt-oss in mxfp4"])
def test_drafts_chunks_and_the_prefix_cache_change_no_bit(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    if "mxfp4" in case:
        write_mxfp4(tmp_path / "plain", folder)
    else:
        write_reference(folder, *CASES[case])
    requests = [tiny_request(index=i, max_tokens=16, temperature=0.7 * i) for i in range(3)]
    options = {"model": str(folder), "dtype": "bf16", "kv_cache_tokens": 2048, "page_size": 4}
    cold = {"drafter": "none", "prefix_cache": False}
    plain = run(build_runner(NodeConfig.model_validate(options | cold)), requests)
    for tree in ({"tree": "chain"}, {"tree": "static", "tree_width": 3}):
        runner = build_runner(NodeConfig.model_validate(options | {"drafter": "ngram", "num_draft_tokens": 4} | tree))
        assert runner.bit_exact
        for how in ({"chunk_tokens": 5}, {"batch": 3}):
            drafted = run(runner, requests, **how)
            assert [(d.token_ids, d.logit_bits) for d in drafted] == [(p.token_ids, p.logit_bits) for p in plain]
