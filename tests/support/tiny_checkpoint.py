"""A tiny random Llama as a checkpoint folder, with the tokenizer of ``tiny_chat``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer
from tests.support.tiny_model import tiny_spec
from tests.support.untrained_heads import write_tiny_model


def write_tiny_llama(folder: Path, max_position_embeddings: int = 256, num_layers: int = 2) -> Path:
    """Weights that make distributions neither flat nor a spike. Returns ``folder``."""
    spec = replace(tiny_spec(CHAT_VOCAB, num_layers), max_position_embeddings=max_position_embeddings)
    write_tiny_model(folder, replace(spec, tie_word_embeddings=False))
    return write_chat_tokenizer(folder)
