"""Tiny GGUF files of random blocks, and what they mean as floats by gguf's own reader."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers

HEADS, KV_HEADS, DIM, HIDDEN, WIDE, VOCAB = 4, 2, 64, 256, 256, 270
HALVES = {  # where a block has float16 numbers, which random bytes must not fill
    Kind.Q8_0: (0,), Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,),
    Kind.IQ3_S: (0,),
}  # fmt: skip
LAYER = {
    "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM), "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN),
    "ffn_down": (HIDDEN, WIDE),
}  # fmt: skip
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
KINDS = {
    "attn_v": Kind.Q6_K,
    "attn_output": Kind.Q4_0,
    "ffn_gate": Kind.Q4_1,
    "ffn_up": Kind.Q4_1,
    "ffn_down": Kind.Q8_0,
}


def random_blocks(kind: Kind, rows: int, columns: int, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """[rows, bytes of a row] of a quantised type."""
    size, width = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (rows * columns // size, width), dtype=np.uint8)
    for at in HALVES[kind]:
        numbers = (random.random(len(blocks)) * 0.01 + 0.002).astype(np.float16) / (100 if "K" in kind.name else 1)
        blocks[:, at : at + 2] = numbers.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path,
    architecture: str,
    *,
    kind: Kind = Kind.Q4_K,
    pre: str = "smollm",
    fields: Mapping[str, object] | None = None,
    split: int = 0,
    fields_apart: bool = False,
) -> dict[str, torch.Tensor]:
    """A model of one layer with tensors of several types, q, k and the table in ``kind``. Returns its weights by
    Hugging Face's names and in its order of rows, float32. split: tensors of each part, where there are several.
    fields_apart: in a part without tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    changed, random = dict(fields or {}), np.random.default_rng(1)
    named = str(changed.pop("general.architecture", architecture))
    writer = gguf.GGUFWriter(str(path), named, split_max_tensors=split, small_first_shard=fields_apart)
    numbers = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": WIDE,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.value_length": DIM,
    }  # fmt: skip
    whole = {f"{architecture}.{name}": number for name, number in numbers.items()} | changed
    for name, value in whole.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_uint32(name, int(str(value)))
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    add_tokenizer(writer, pre)
    meant = _add_tensors(writer, architecture, kind, random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    """A byte-level tokenizer with three merges, of VOCAB tokens."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab", "Ġab"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (len(tokens) - len(control)))
    writer.add_token_merges(["1 2", "a b", "Ġ ab"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_tensors(
    writer: gguf.GGUFWriter, architecture: str, kind: Kind, random: np.random.Generator
) -> dict[str, torch.Tensor]:
    meant = {}
    shapes = {"token_embd": (VOCAB, HIDDEN)} | {f"blk.0.{part}": shape for part, shape in LAYER.items()}
    for name, shape in shapes.items():
        part = name.rpartition(".")[2]
        own = KINDS.get(part, kind)
        rows = random_blocks(own, *shape, random)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=own)
        values = torch.zeros(shape) if own is Kind.IQ3_S else torch.from_numpy(gguf.quants.dequantize(rows, own).copy())
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(part) if architecture == "llama" else None
        meant[_name(name)] = values if heads is None else _halves(values, heads)
    vectors = {"output_norm": HIDDEN, "blk.0.attn_norm": HIDDEN, "blk.0.ffn_norm": HIDDEN}
    if architecture == "qwen3":
        vectors |= {"blk.0.attn_q_norm": DIM, "blk.0.attn_k_norm": DIM}
    for name, size in vectors.items():
        vector = random.random(size).astype(np.float32) + 0.5
        writer.add_tensor(f"{name}.weight", vector)
        meant[_name(name)] = torch.from_numpy(vector)
    if architecture == "qwen2":
        for part in ("attn_q", "attn_k", "attn_v"):
            bias = random.random(LAYER[part][0]).astype(np.float32)
            writer.add_tensor(f"blk.0.{part}.bias", bias)
            meant[f"model.layers.0.{NAMES[part]}.bias"] = torch.from_numpy(bias)
    return meant


def _name(name: str) -> str:
    top = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    return top.get(name) or f"model.layers.0.{NAMES[name.rpartition('.')[2]]}.weight"


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row 2 i of a head in llama.cpp's order is row i here, row 2 i + 1 is row dim / 2 + i."""
    dim = weight.shape[0] // heads
    turned = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        head, within = divmod(row, dim)
        turned[head * dim + within // 2 + (dim // 2 if within % 2 else 0)] = weight[row]
    return turned
