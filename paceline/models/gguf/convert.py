"""What a GGUF file says beside its weights, as the files of a Hugging Face folder; and a whole folder in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from paceline.layers.rotary import rope_table
from paceline.models.gguf.experts import expert_config
from paceline.models.gguf.fields import Fields
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.gemma import gemma3_config
from paceline.models.gguf.latent import LATENT, latent_config, rope_width, sharpness
from paceline.models.gguf.tensors import ROPE_FACTORS, GgufTensors
from paceline.models.gguf.tokenizer import write_tokenizer

ARCHITECTURES = {  # Hugging Face's class and type of model
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "glm4moe": ("Glm4MoeForCausalLM", "glm4_moe"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "deepseek2": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
WITH_WINDOWS = ("gpt-oss", "gemma3")
WITH_EXPERTS = ("qwen3moe", "gpt-oss", "glm4moe", *LATENT)
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
ENDS = {  # of a turn or a text, which files have one field for; a call of a tool is one
    "llama": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "qwen2": _QWEN_ENDS,
    "qwen3": _QWEN_ENDS,
    "qwen3moe": _QWEN_ENDS,
    "gpt-oss": ("<|call|>", "<|endoftext|>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gemma3": ("<end_of_turn>", "<eos>"),
    # DeepSeek's own, Kimi K2's, and those of GLM-4.7-Flash: no vocabulary of one has another's.
    "deepseek2": ("<｜end▁of▁sentence｜>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|observation|>"),
}
TOKENIZER = "tokenizer.json"
FROM_BESIDE = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)  # of the rope of Llama 3.1 and its kin
LLAMA3_ORIGINAL = 8192


def convert(source: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write the model of ``source`` into ``folder`` (which exists): bf16 safetensors, configs, tokenizer.

    Raises ConfigError for a model or a tokenizer that is not known here.
    """
    file = GgufFile(source)
    if (fields := Fields(file)).architecture == "gpt-oss":  # its checkpoints have gate and up by turns
        raise fields.refused("a gpt-oss is served as it lies in the file, and not written as a folder")
    write_configs(file, folder)
    stored = GgufTensors(file, torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for i, name in enumerate(stored):
        tensors[name] = stored.floats(name).to(stored.dtype_of(name)).contiguous()
        progress("converting weights", (i + 1) / len(stored))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone


def write_configs(file: GgufFile, folder: Path, beside: Path | None = None) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into ``folder``.

    beside: a folder whose tokenizer.json, where it has one, is taken in place of the file's tokenizer. Raises
    ConfigError.
    """
    fields = _known(Fields(file))
    config = _config(file, fields)
    _write(folder / "config.json", config)
    eos, bos = fields.token("eos"), fields.token("bos")
    ends = list(dict.fromkeys(i for i in (eos, fields.token("eot"), *_named_ends(fields)) if i is not None))
    _write(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": ends if len(ends) > 1 else eos, "pad_token_id": eos},
    )
    if beside is not None and (beside / TOKENIZER).is_file():
        for name in FROM_BESIDE:
            if (beside / name).is_file():
                (folder / name).write_bytes((beside / name).read_bytes())
    else:
        write_tokenizer(file, folder, config["max_position_embeddings"])


def _named_ends(fields: Fields) -> list[int]:
    """Tokens that end a turn besides those that a file has fields for."""
    tokens, names = fields.common("tokenizer.ggml.tokens"), ENDS.get(fields.architecture, ())
    return [tokens.index(name) for name in names if isinstance(tokens, list) and name in tokens]


def _known(fields: Fields) -> Fields:
    """Raises ConfigError for an architecture that is not known."""
    if fields.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise fields.refused(f"general.architecture {fields.architecture!r} is not supported ({known})")
    return fields


def _config(file: GgufFile, fields: Fields) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise fields.refused("it has no table token_embd.weight")
    vocab, hidden = file.tensors["token_embd.weight"].shape
    heads = fields.whole("attention.head_count")
    latent = fields.architecture in LATENT
    dim = rope_width(fields) if latent else fields.whole("attention.key_length", hidden // heads)
    architecture, kind = ARCHITECTURES[fields.architecture]
    return (
        {
            "architectures": [architecture],
            "model_type": kind,
            "torch_dtype": "bfloat16",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": fields.num_layers(),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
            "head_dim": dim,
            "rms_norm_eps": round(float(fields.number("attention.layer_norm_rms_epsilon")), 9),
            "rope_theta": _theta(fields),
            "max_position_embeddings": fields.whole("context_length"),
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": fields.token("bos"),
            "eos_token_id": fields.token("eos"),
        }
        | _heads(file, fields, dim)
        | _rope_scaling(file, fields, dim)
        | _mlps(fields)
        | (gemma3_config(fields, hidden // heads, dim) if fields.architecture == "gemma3" else {"hidden_act": "silu"})
    )


def _heads(file: GgufFile, fields: Fields, dim: int) -> dict[str, Any]:
    """What sets the attention of an architecture apart, by the tensors where no field says it. Raises ConfigError for
    heads that no family has."""
    if fields.architecture in LATENT:
        return latent_config(fields)
    turned, glm = fields.whole("rope.dimension_count", dim), fields.architecture == "glm4moe"
    share = turned / dim
    in_part = glm and turned in range(2, dim, 2) and int(dim * share) == turned
    if fields.whole("attention.value_length", dim) != dim or not (turned == dim or in_part):
        raise fields.refused("heads of which rope turns a part, and values of another width, are not supported")
    if not glm:
        return {}
    return {
        "partial_rotary_factor": share,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def _mlps(fields: Fields) -> dict[str, Any]:
    """What the MLPs of an architecture are. Raises ConfigError for experts and windows where it has none."""
    if fields.architecture not in WITH_WINDOWS and fields.get("attention.sliding_window"):
        raise fields.refused(f"sliding windows are not supported in GGUF files of {fields.architecture}")
    if fields.architecture in WITH_EXPERTS:
        wide = fields.whole("expert_feed_forward_length")
        return {"intermediate_size": fields.whole("feed_forward_length", wide)} | expert_config(fields)
    if fields.get("expert_count"):
        raise fields.refused(f"experts are not supported in GGUF files of {fields.architecture}")
    return {"intermediate_size": fields.whole("feed_forward_length")}


def _theta(fields: Fields) -> float:
    """What rope's angles are powers of. Raises ConfigError for one that is not above 1: YaRN takes its logarithm."""
    if (theta := float(fields.number("rope.freq_base", 10000.0))) <= 1:
        raise fields.refused(f"{fields.architecture}.rope.freq_base is {theta}, expected more than 1")
    return theta


def _rope_scaling(file: GgufFile, fields: Fields, dim: int) -> dict[str, Any]:
    kind = fields.get("rope.scaling.type") or "none"
    if ROPE_FACTORS in file.tensors:
        return {"rope_scaling": _llama3(file, fields, dim)}
    if kind == "none":
        return {}
    if kind == "yarn":
        return {"rope_scaling": _yarn(fields)}
    if kind != "linear":
        raise fields.refused(f"rope scaling {kind!r} is not supported (none, linear, yarn, Llama 3's)")
    if (factor := float(fields.number("rope.scaling.factor"))) <= 0:
        raise fields.refused(f"{fields.architecture}.rope.scaling.factor is {factor}, expected more than 0")
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _yarn(fields: Fields) -> dict[str, Any]:
    """A rope of YaRN. Raises ConfigError where it is sharpened otherwise than by its factor and, with latents, by its
    multiplier."""
    latent = fields.architecture in LATENT
    for name in ("yarn_attn_factor", "attn_factor", *(() if latent else ("yarn_log_multiplier",))):
        if (value := fields.get(f"rope.scaling.{name}")) is not None:
            raise fields.refused(f"{fields.architecture}.rope.scaling.{name} {value!r} is not supported")
    if fields.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise fields.refused(f"{fields.architecture}.rope.scaling.yarn_ext_factor is not 1")
    if (factor := float(fields.number("rope.scaling.factor"))) < 1:
        raise fields.refused(f"{fields.architecture}.rope.scaling.factor is {factor}, expected 1 or more")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.whole("rope.scaling.original_context_length"),
        "beta_fast": float(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": float(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        "truncate": fields.architecture != "gpt-oss",  # no field has it; the model was trained without
    } | (sharpness(fields) if latent else {})


def _llama3(file: GgufFile, fields: Fields, dim: int) -> Mapping[str, Any]:
    """The rope of Llama 3.1 whose stretch the file lists by frequency. Raises ConfigError for another list."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind is not GGMLQuantizationType.F32 or tensor.shape != (dim // 2,):
        raise fields.refused(f"{ROPE_FACTORS} is not a list of {dim // 2} numbers in F32")
    stored = torch.frombuffer(bytearray(file.rows(tensor).tobytes()), dtype=torch.float32)
    theta = _theta(fields)
    plain = _frequencies(dim, theta, None)
    for factor in LLAMA3_FACTORS:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": float(LLAMA3_ORIGINAL),
        }
        ratios = plain / _frequencies(dim, theta, scaling)
        if stored.shape == ratios.shape and torch.allclose(stored, ratios, rtol=1e-4):
            return scaling
    raise fields.refused(f"{ROPE_FACTORS} is not the rope of a Llama 3")


def _frequencies(dim: int, theta: float, scaling: Mapping[str, Any] | None) -> torch.Tensor:
    """What rope turns by at position 1, radians; float32 [dim / 2]."""
    cosines, sines = rope_table(dim, theta, 2, scaling)[1].chunk(2)
    return torch.atan2(sines, cosines)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
