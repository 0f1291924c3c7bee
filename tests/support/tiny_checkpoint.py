"""A tiny random Llama as a checkpoint folder, made by transformers, with the tokenizer of ``tiny_chat``."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer


def write_tiny_llama(folder: Path, max_position_embeddings: int = 256, num_layers: int = 2) -> Path:
    """Weights that make distributions neither flat nor a spike. Returns ``folder``."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=CHAT_VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.2,
    )
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return write_chat_tokenizer(folder)
