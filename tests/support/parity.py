"""Tiny random checkpoints that transformers writes and computes, and what Paceline makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.base import AttentionBackend
from paceline.attention.select import attention_for
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.models.registry import load_target

VOCAB = 211
TOKENS = [(17 * i + 3) % VOCAB for i in range(45)]


def write_reference(folder: Path, family: str, config: dict[str, Any], length: int = 45) -> torch.Tensor:
    """Save a random model of transformers' class ``{family}ForCausalLM``; its logits of TOKENS[:length]."""
    import transformers

    torch.manual_seed(5)
    made = getattr(transformers, f"{family}Config" if family != "Gemma3" else "Gemma3TextConfig")(**config)
    made._attn_implementation = "eager"
    reference = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    with torch.no_grad():  # biases, norms and sinks start as zeros and ones: make them count
        for name, value in (*reference.named_parameters(), *reference.named_buffers()):
            if any(part in name for part in ("norm", "bias", "sinks")):
                value.add_(torch.randn_like(value) * 0.3)
    reference.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([TOKENS[:length]])).logits[0]
    return logits


def logits_of(model: TargetModel, chunks: tuple[int, ...], attention: AttentionBackend | None = None) -> torch.Tensor:
    """Logits of TOKENS in chunks, float32 [sum(chunks), vocab]. attention: None for what the host takes."""
    spec = model.spec
    kv, allocator = KvPool(KvLayout(model.kv_layers, model.dtype), 32, 8), PageAllocator(32)
    attention = attention or attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return logits_in_chunks(model, kv, allocator, attention, TOKENS[: sum(chunks)], chunks)


def worst_difference(folder: Path, expected: torch.Tensor) -> float:
    """Largest difference of float32 logits over three ways to cut 45 tokens, and the reference backend."""
    model = load_target(folder, torch.float32, torch.device("cpu"))
    cuts: list[tuple[tuple[int, ...], AttentionBackend | None]] = [
        ((45,), None),
        ((20, 1, 1, 23), None),
        ((1,) * 45, None),
        ((20, 1, 24), TorchAttention()),
    ]
    return max((logits_of(model, chunks, backend) - expected).abs().max().item() for chunks, backend in cuts)
