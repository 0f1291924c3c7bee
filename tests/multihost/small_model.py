"""A checkpoint with enough KV to be seen on a cable: 8 layers, 1 KiB of bf16 KV a token, a context of 4096."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.models.config import ModelSpec
from paceline.models.llama_shapes import model_shapes
from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer
from tests.support.tiny_model import tiny_spec, tiny_weights

SPEC: ModelSpec = replace(tiny_spec(CHAT_VOCAB, num_layers=8), max_position_embeddings=4096)
KV_BYTES_PER_TOKEN = SPEC.num_layers * 2 * SPEC.num_kv_heads * SPEC.head_dim * 2  # algorithms.md H4, bf16


def write_model(folder: Path, spec: ModelSpec = SPEC, seed: int = 3) -> Path:
    """The folder, as a hub has it. seed: of the weights."""
    write_chat_tokenizer(folder)
    bag = tiny_weights(spec, torch.bfloat16, seed)
    save_file({name: bag.take(name, shape) for name, shape in model_shapes(spec).items()}, folder / "model.safetensors")
    bag.finish()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": True,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
