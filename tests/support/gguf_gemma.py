"""Tiny GGUF files of Gemma 3 as llama.cpp writes them, and what they mean as floats; a tiny vocabulary of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.gguf_experts import ExpertFile, Value, shape_fields
from tests.support.gguf_files import HEADS, HIDDEN, KV_HEADS, VOCAB, WIDE
from tests.support.gguf_spm import BYTES, SpmVocabulary

LAYERS, WINDOW = 7, 5  # the sixth layer sees all
NAMES = {  # of a layer's tensors: llama.cpp's and Hugging Face's
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
PIECES = {"ab": 0.0, "▁a": -1.0, "▁ab": -2.0, "▁": -3.0, "a": -4.0, "b": -5.0, "\n": -6.0, "c": -7.0}


def vocabulary(turns: int = 3) -> SpmVocabulary:
    """VOCAB tokens. turns: the kind of those that stand around a turn."""
    tokens = [*SPECIAL, *BYTES, *PIECES]
    assert len(tokens) == VOCAB
    kinds = [3, 3, 3, 2, turns, turns, *[6] * 256, *[1] * len(PIECES)]
    return SpmVocabulary(tokens, [PIECES.get(token, -1000.0) for token in tokens], kinds)


def add_vocabulary(writer: gguf.GGUFWriter, turns: int = 3) -> None:
    """See ``vocabulary``. Google's files do not say that no space comes first."""
    vocabulary(turns).add_to(writer)
    for name, index in {"padding": 0, "eos": 1, "bos": 2, "unknown": 3}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)


def write_gemma3(
    path: Path,
    kind: Kind,
    fields: Mapping[str, Value] | None = None,
    *,
    table: Kind | None = None,
    head_dim: int = 64,
    images: bool = False,
    turns: int = 3,
    seed: int = 7,
) -> dict[str, torch.Tensor]:
    """A gemma3 whose matrices are of ``kind``, and its table of another. Returns its weights. images: it has tensors of
    them as well. turns: see ``vocabulary``."""
    own: dict[str, Value] = {
        "block_count": LAYERS, "feed_forward_length": WIDE, "attention.sliding_window": WINDOW,
        "rope.freq_base": 100000.0, "attention.key_length": head_dim, "attention.value_length": head_dim,
    }  # fmt: skip
    shape = {name: value for name, value in shape_fields(own).items() if "expert" not in name}
    file = ExpertFile(path, "gemma3", shape | dict(fields or {}), seed)
    file.add("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN), table or kind)
    _norm(file, "output_norm.weight", "model.norm.weight", HIDDEN)
    queries, keys = HEADS * head_dim, KV_HEADS * head_dim
    matrices = {
        "attn_q": (queries, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN),
        "attn_output": (HIDDEN, queries), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN),
        "ffn_down": (HIDDEN, WIDE),
    }  # fmt: skip
    for layer in range(LAYERS):
        for name, meaning in NAMES.items():
            ours, theirs = f"blk.{layer}.{name}.weight", f"model.layers.{layer}.{meaning}.weight"
            if name in matrices:
                file.add(ours, theirs, matrices[name], kind)
            else:
                _norm(file, ours, theirs, head_dim if name in ("attn_q_norm", "attn_k_norm") else HIDDEN)
    if images:
        file.add("v.blk.0.attn_q.weight", "images", (HIDDEN, HIDDEN), Kind.F16)
        file.add("mm.input_projection.weight", "images", (HIDDEN, HIDDEN), Kind.F16)
        del file.meant["images"]
    return file.close(lambda writer: add_vocabulary(writer, turns))


def _norm(file: ExpertFile, name: str, meaning: str, size: int) -> None:
    """A norm's weight in bf16, to which llama.cpp adds one."""
    weight = torch.from_numpy(file.random.random(size) - 0.5).bfloat16().float()
    file.vector(name, meaning, (weight + 1.0).numpy())
    file.meant[meaning] = weight
