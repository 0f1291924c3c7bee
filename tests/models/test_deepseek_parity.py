"""DeepSeek-V3 against transformers: tiny random checkpoints, prefilled whole, in chunks and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.attention.cpu import CpuAttention
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayer, KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.loader import WeightBag
from paceline.models.registry import load_target
from paceline.spec_decode.heads.mtp import MtpModule
from tests.support.needs import needs_kernels

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    needs_kernels,
]

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "query rank": {},
    "no query rank": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "yarn, mscale of its own": {"rope_parameters": YARN | {"mscale": 0.7, "factor": 8.0}},
    "yarn, no mscale_all_dim": {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "one group, weights not normalised": {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "all experts": {"num_experts_per_tok": 8, "topk_group": 4},
    "all dense": {"first_k_dense_replace": 3},
    "no dense": {"first_k_dense_replace": 0},
    "halves, not pairs": {"rope_interleave": False},
    "biases": {"attention_bias": True},
    "biases, no query rank": {"attention_bias": True, "q_lora_rank": None},
    "tied": {"tie_word_embeddings": True},
    "odd widths": {"kv_lora_rank": 28, "qk_rope_head_dim": 6, "num_attention_heads": 3, "num_key_value_heads": 3},
    "wide latent": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
}
TOKENS = [(17 * i + 3) % 211 for i in range(45)]


def write_checkpoint(folder: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Save a random model; transformers' logits of TOKENS, [45, 211]."""
    import transformers

    torch.manual_seed(5)
    reference = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**(SHAPE | changes))).eval()
    with torch.no_grad():  # biases and norms start as zeros and ones: make them count
        named = [*reference.named_parameters(), *reference.named_buffers()]
        for name, value in named:
            if "norm" in name or "bias" in name:
                value.add_(torch.randn_like(value) * 0.3)
    reference.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([TOKENS])).logits[0]
    return logits


def ours(model: TargetModel, chunks: tuple[int, ...], backend: AttentionBackend) -> torch.Tensor:
    kv, allocator = KvPool(KvLayout(model.kv_layers, model.dtype), 16, 8), PageAllocator(16)
    return logits_in_chunks(model, kv, allocator, backend, TOKENS, chunks)


@pytest.mark.parametrize("case", CASES)
def test_tiny_checkpoints(case: str, tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path, CASES[case])
    model = load_target(tmp_path, torch.float32, torch.device("cpu"))
    for chunks in ((45,), (20, 1, 1, 23), (1,) * 45):
        worst = (ours(model, chunks, CpuAttention()) - expected).abs().max().item()
        assert worst < 1e-4, f"largest difference {worst} in chunks of {chunks}"
    assert expected.std() > 0.5  # the comparison is of something


def test_reference_backend(tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path, {"rope_parameters": YARN})
    model = load_target(tmp_path, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(ours(model, (30, 15), TorchAttention()), expected, rtol=0, atol=1e-4)


def unfused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A decoder layer's weights as checkpoints name them: transformers keeps all experts in one tensor."""
    named = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for i, (both, down) in enumerate(
        zip(state["mlp.experts.gate_up_proj"], state["mlp.experts.down_proj"], strict=True)
    ):
        parts = zip(("gate", "up", "down"), (*both.chunk(2), down), strict=True)
        named |= {f"mlp.experts.{i}.{name}_proj.weight": part.contiguous() for name, part in parts}
    return named


def test_mtp_module(tmp_path: Path) -> None:
    """J7: a module against the formula of C8 with transformers' decoder layer as its block."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

    write_checkpoint(tmp_path, {})
    model = load_target(tmp_path, torch.float32, torch.device("cpu"))
    config = DeepseekV3Config(**SHAPE)
    config._attn_implementation = "eager"
    layer = reference.DeepseekV3DecoderLayer(config, layer_idx=3).eval()
    weights = {name: torch.randn(64) * 0.2 + 1 for name in ("enorm", "hnorm", "shared_head.norm")}
    weights["eh_proj"] = torch.randn(64, 128) * 0.1
    with torch.no_grad():
        for value in (*layer.parameters(), *layer.buffers()):
            value.copy_(torch.randn_like(value) * 0.2)
    embedded, hidden = torch.randn(2, 45, 64)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (64,), weights[name], 1e-6)

    joined = torch.cat((norm(embedded, "enorm"), norm(hidden, "hnorm")), dim=-1) @ weights["eh_proj"].T
    cos_sin = reference.DeepseekV3RotaryEmbedding(config)(joined, torch.arange(45)[None])
    mask = torch.full((45, 45), -torch.inf).triu(1)[None, None]
    with torch.inference_mode():
        expected = norm(layer(joined[None], attention_mask=mask, position_embeddings=cos_sin)[0], "shared_head.norm")

    bag = WeightBag(
        {f"model.layers.3.{name}.weight": tensor for name, tensor in weights.items()}
        | {f"model.layers.3.{name}": tensor for name, tensor in unfused(layer.state_dict()).items()}
    )
    module = MtpModule(model, bag, "model.layers.3", 3, model.rope_table())
    bag.finish()
    draft = KvLayer(model.kv_layers[-1].kind, LayerOwner.DRAFT, 1, model.kv_layers[-1].head_dim)
    kv, slots = KvPool(KvLayout((*model.kv_layers, draft), torch.float32), 16, 8), torch.arange(64, dtype=torch.int32)
    outputs = []
    for start, end in ((0, 30), (30, 31), (31, 45)):
        batch = ForwardBatch.build([Segment.linear([0] * (end - start), start, slots)])
        context = ForwardContext.build(batch, kv, CpuAttention())
        outputs.append(module(embedded[start:end], hidden[start:end], context))
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=0, atol=1e-4)
