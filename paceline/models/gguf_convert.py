"""A Llama-architecture GGUF to a Hugging Face folder: dequantized weights, config, tokenizer.

llama.cpp interleaves the rows of q and k for its rope; Hugging Face rotates halves. The interleave is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import ConfigError

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
CONTROL = 3  # gguf token type
READS = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES or not name.endswith(".weight"):
        raise ConfigError("model", f"GGUF tensor {name} is not one of the Llama architecture")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def undo_interleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """q or k rows from llama.cpp's order (pairs) to rotate-half (halves). weight: [heads * dim, hidden]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(source: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write the model of ``source`` into ``folder`` (which exists): bf16 safetensors, configs, tokenizer.

    Raises ConfigError when it is not a Llama with the tokenizer of SmolLM, the only kind that is rebuilt here.
    """
    reader = GGUFReader(str(source))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for key, expected in READS.items():
        if fields.get(key) != expected:
            raise ConfigError("model", f"{source.name}: {key} is {fields.get(key)!r}, expected {expected!r}")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors: dict[str, torch.Tensor] = {}
    for i, tensor in enumerate(reader.tensors):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            values = undo_interleave(values, heads if ".attn_q." in tensor.name else kv_heads)
        tensors[hugging_face_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
        progress("converting weights", (i + 1) / len(reader.tensors))
    tied = "lm_head.weight" not in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone
    _write(folder / "config.json", _config(fields, tensors, tied))
    eos, bos = fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.bos_token_id"]
    _write(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    _write_tokenizer(fields, folder)


def _config(fields: dict[str, Any], tensors: dict[str, torch.Tensor], tied: bool) -> dict[str, Any]:
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // fields["llama.attention.head_count"],
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "max_position_embeddings": fields["llama.context_length"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[index]

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding") or token("eos"),
        "unk_token": token("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
