"""Qwen3-MoE and GLM-4.5 against transformers: tiny random checkpoints, and GLM's own MTP module as the drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.assembly.build import build_runner
from paceline.assembly.shipped import resolve_drafter
from paceline.config import NodeConfig
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.parity import VOCAB, worst_difference, write_reference
from tests.support.proposed import proposed_by
from tests.support.tiny_model import tiny_request

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # transformers' own
    needs_kernels,
]

QWEN3: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GLM: dict[str, Any] = {
    **{key: value for key, value in QWEN3.items() if key != "num_experts"},
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Moe", QWEN3),
    "qwen3, weights not normalised": ("Qwen3Moe", QWEN3 | {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "qwen3, some layers dense": ("Qwen3Moe", QWEN3 | {"mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "glm": ("Glm4Moe", GLM),
    "glm, norms on heads": ("Glm4Moe", GLM | {"use_qk_norm": True, "n_group": 2, "attention_bias": False}),
    "glm, twelve heads a group": ("Glm4Moe", GLM | {"num_attention_heads": 12, "num_key_value_heads": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_tiny_checkpoints(case: str, tmp_path: Path) -> None:
    expected = write_reference(tmp_path, *CASES[case])
    assert worst_difference(tmp_path, expected) < 1e-4
    assert expected.std() > 0.5  # the comparison is of something


@pytest.mark.parametrize(("tree", "handoff"), [("chain", "draft_kv"), ("dynamic", "hidden_states")])
async def test_the_module_of_glm_drafts_and_changes_nothing(tmp_path: Path, tree: str, handoff: str) -> None:
    """A checkpoint with a layer after its last, as GLM-4.5 has: the target leaves it, ``default`` drafts with it, and
    proposes the same where prefill and decode are apart. Mutants: see test_mimo."""
    write_reference(tmp_path, "Glm4Moe", GLM | {"num_nextn_predict_layers": 1})
    tensors = load_file(tmp_path / "model.safetensors")
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.2.")}
    module = {name.replace(".layers.2.", ".layers.3."): value.flip(0).clone() for name, value in last.items()}
    generator = torch.Generator().manual_seed(3)
    module |= {f"model.layers.3.{name}.weight": torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    module["model.layers.3.eh_proj.weight"] = torch.randn(64, 128, generator=generator) * 0.1
    module["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    module["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | module, tmp_path / "model.safetensors")
    options: dict[str, object] = {"model": str(tmp_path), "dtype": "bf16", "kv_cache_tokens": 2048}
    assert resolve_drafter(NodeConfig.model_validate(options)) == "mtp"
    requests = [tiny_request(index=i, max_tokens=12, temperature=0.7 * i) for i in range(2)]
    plain = run(build_runner(NodeConfig.model_validate(options | {"drafter": "none"})), requests)
    heads = {"drafter": "mtp", "num_draft_tokens": 3, "tree": tree, "head_check": False, "handoff": handoff}
    config = NodeConfig.model_validate(options | heads | {"prefill_chunk_tokens": 7})
    alone, decode = build_runner(config), build_runner(config)
    proposed, apart = proposed_by(alone), proposed_by(decode)
    drafted = run(alone, requests, batch=2, chunk_tokens=7)
    assert [(d.token_ids, d.logit_bits) for d in drafted] == [(p.token_ids, p.logit_bits) for p in plain]
    async with pair(config, build_runner(config, decodes=False), decode) as nodes:
        assert [outcome for outcome, _ in await nodes.run(requests, concurrent=2)] == drafted
    assert sorted(apart) == sorted(proposed) != []
