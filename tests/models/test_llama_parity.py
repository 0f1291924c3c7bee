"""The Llama family against transformers: tiny random checkpoints of each, and the real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.build import build_runner
from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.base import AttentionBackend
from paceline.attention.select import attention_for
from paceline.attention.torch_paged import TorchAttention
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import TargetModel
from paceline.models.registry import load_target
from paceline.request import SamplingParams, SequenceRequest
from tests.support.worker_memory import give_back

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2, tied": ("Qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    "llama, as many KV heads": ("Llama", {"num_key_value_heads": 4}),
    "qwen3, one KV head": ("Qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
}
TOKENS = [(17 * i + 3) % 211 for i in range(45)]


PARAGRAPH = (
    "The city grew up on two islands in the river, and for centuries its only bridges were made of wood. When the last "
    "of them burned in the winter of 1281, the council decided to build in stone. It took thirty years, and the man "
    "who had drawn the plans did not live to walk across."
)


def ours(
    folder: Path,
    tokens: list[int],
    chunks: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    attention: AttentionBackend | None = None,
) -> torch.Tensor:
    return logits_of(load_target(folder, dtype, torch.device("cpu")), tokens, chunks, attention)


def logits_of(
    model: TargetModel, tokens: list[int], chunks: tuple[int, ...], attention: AttentionBackend | None = None
) -> torch.Tensor:
    spec = model.spec
    kv, allocator = KvPool(KvLayout(model.kv_layers, model.dtype), 32, 8), PageAllocator(32)
    attention = attention or attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return logits_in_chunks(model, kv, allocator, attention, tokens, chunks)


@pytest.mark.parametrize("case", CASES)
def test_tiny_checkpoints(case: str, tmp_path: Path) -> None:
    import transformers

    family, changes = CASES[case]
    config = getattr(transformers, f"{family}Config")(**(SHAPE | changes))
    torch.manual_seed(5)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # biases and norms start as zeros and ones: make them count
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3 if "bias" in name or "norm" in name else 0.0)
    reference.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    for chunks, attention in (
        ((45,), None),
        ((20, 1, 1, 23), None),
        ((1,) * 45, None),
        ((20, 1, 24), TorchAttention()),
    ):
        worst = (ours(tmp_path, TOKENS, chunks, attention=attention) - expected).abs().max().item()
        assert worst < 1e-4, f"largest difference {worst} in chunks of {chunks}, attention {attention}"


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    """logits: [T, vocab_size] of ``tokens``."""
    return torch.nn.functional.cross_entropy(logits[:-1].float(), torch.tensor(tokens[1:])).exp().item()


@pytest.mark.real_model
def test_real_model(smollm2_folder: Path) -> None:
    import transformers

    from paceline.text.tokenizer import Tokenizer

    give_back()
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    tokens = Tokenizer.from_folder(smollm2_folder).encode(PARAGRAPH)[:60]
    assert len(tokens) == 60
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    del reference
    give_back()  # two of this size at once fill a worker
    model = load_target(smollm2_folder, torch.float32, torch.device("cpu"))
    for chunks in ((60,), (41, 1, 1, 17)):
        worst = (logits_of(model, tokens, chunks) - expected).abs().max().item()
        assert worst < 1e-3, f"largest difference {worst} in chunks of {chunks}"
    del model
    give_back()
    wanted, served = (
        perplexity(expected, tokens),
        perplexity(ours(smollm2_folder, tokens, (60,), torch.bfloat16), tokens),
    )
    assert served == pytest.approx(wanted, rel=0.02)


@pytest.mark.real_model
def test_real_answer(smollm2_folder: Path) -> None:
    """The known greedy answer, through chat template and detokenizer, in bf16. What follows depends on the processor:
    two tokens are all but equally likely there, and sums in bf16 kernels are ordered for the instruction set."""
    from paceline.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(smollm2_folder)
    question = "What is the capital of France, and what is it famous for?"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    runner = build_runner(NodeConfig(model=str(smollm2_folder), drafter="ngram"))
    request = SequenceRequest("r", tuple(ids), SamplingParams(temperature=0.0, seed=0, max_tokens=24))
    text = tokenizer.decode(ColocatedEngine(runner).generate([request])[0].token_ids)
    assert text.startswith("The capital of France is Paris. It")
