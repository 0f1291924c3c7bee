"""What a GGUF file says beside its weights, as the files of a Hugging Face folder; and a whole folder in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.layers.rotary import rope_table
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.tensors import ROPE_FACTORS, GgufTensors
from paceline.models.gguf.tokenizer import write_tokenizer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOKENIZER = "tokenizer.json"
FROM_BESIDE = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
LLAMA3_FACTORS = (8.0, 32.0, 16.0, 4.0, 2.0)  # of the rope of Llama 3.1 and its kin
LLAMA3_ORIGINAL = 8192


def convert(source: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write the model of ``source`` into ``folder`` (which exists): bf16 safetensors, configs, tokenizer.

    Raises ConfigError for a model or a tokenizer that is not known here.
    """
    file = GgufFile(source)
    write_configs(file, folder)
    stored = GgufTensors(file, torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for i, name in enumerate(stored):
        tensors[name] = stored.floats(name).to(torch.bfloat16).contiguous()
        progress("converting weights", (i + 1) / len(stored))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file makes it readable by its owner alone


def write_configs(file: GgufFile, folder: Path, beside: Path | None = None) -> None:
    """Write config.json, generation_config.json and the tokenizer's files into ``folder``.

    beside: a folder whose tokenizer.json, where it has one, is taken in place of the file's tokenizer. Raises
    ConfigError.
    """
    fields = _Fields(file)
    config = _config(file, fields)
    _write(folder / "config.json", config)
    eos = fields.token("eos")
    ends = list(dict.fromkeys(i for i in (eos, fields.token("eot")) if i is not None))
    bos = fields.token("bos")
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


class _Fields:
    """Fields of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        """Raises ConfigError for an architecture that is not known, and for a part of a file that was split."""
        self._file, self._fields = file, file.fields
        self.architecture = self._fields.get("general.architecture")
        if not isinstance(self.architecture, str) or self.architecture not in ARCHITECTURES:
            raise self.refused(
                f"general.architecture {self.architecture!r} is not supported ({', '.join(ARCHITECTURES)})"
            )
        if (parts := self._fields.get("split.count", 1)) not in (0, 1):
            raise self.refused(f"it is one of {parts} files; join them with llama-gguf-split --merge")

    def refused(self, message: str) -> ConfigError:
        """An error about this file."""
        return ConfigError("model", f"{self._file.path.name}: {message}")

    def number(self, name: str, default: float | None = None) -> float:
        """A number of the architecture. Raises ConfigError where there is none, or it is below 0."""
        value = self._fields.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1 << 40:
            raise self.refused(f"{self.architecture}.{name} is {value!r}, expected a number")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """The same of a whole number above 0."""
        value = self.number(name, default)
        if not isinstance(value, int) or value < 1:
            raise self.refused(f"{self.architecture}.{name} is {value!r}, expected a whole number above 0")
        return value

    def get(self, name: str) -> Any:
        """A field of the architecture; None where it has none."""
        return self._fields.get(f"{self.architecture}.{name}")

    def token(self, name: str) -> int | None:
        """The id of a special token."""
        value = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) else None


def _config(file: GgufFile, fields: _Fields) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors or len(file.tensors["token_embd.weight"].shape) != 2:
        raise fields.refused("it has no table token_embd.weight")
    if fields.get("expert_count") or fields.get("attention.sliding_window"):
        raise fields.refused("experts and sliding windows are not supported in GGUF files")
    vocab, hidden = file.tensors["token_embd.weight"].shape
    heads = fields.whole("attention.head_count")
    dim = fields.whole("attention.key_length", hidden // heads)
    if fields.whole("rope.dimension_count", dim) != dim or fields.whole("attention.value_length", dim) != dim:
        raise fields.refused("heads of which rope turns a part, and values of another width, are not supported")
    return {
        "architectures": [ARCHITECTURES[str(fields.architecture)]],
        "model_type": fields.architecture,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": dim,
        "rms_norm_eps": round(float(fields.number("attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": float(fields.number("rope.freq_base", 10000.0)),
        "max_position_embeddings": fields.whole("context_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": fields.token("bos"),
        "eos_token_id": fields.token("eos"),
    } | _rope_scaling(file, fields, dim)


def _rope_scaling(file: GgufFile, fields: _Fields, dim: int) -> dict[str, Any]:
    kind = fields.get("rope.scaling.type") or "none"
    if ROPE_FACTORS in file.tensors:
        return {"rope_scaling": _llama3(file, fields, dim)}
    if kind == "none":
        return {}
    if kind != "linear":
        raise fields.refused(f"rope scaling {kind!r} is not supported (none, linear, Llama 3's)")
    return {"rope_scaling": {"rope_type": "linear", "factor": float(fields.number("rope.scaling.factor"))}}


def _llama3(file: GgufFile, fields: _Fields, dim: int) -> Mapping[str, Any]:
    """The rope of Llama 3.1 whose stretch the file lists by frequency. Raises ConfigError for another list."""
    tensor = file.tensors[ROPE_FACTORS]
    if tensor.kind is not GGMLQuantizationType.F32 or tensor.shape != (dim // 2,):
        raise fields.refused(f"{ROPE_FACTORS} is not a list of {dim // 2} numbers in F32")
    stored = torch.frombuffer(bytearray(file.rows(tensor).tobytes()), dtype=torch.float32)
    theta = float(fields.number("rope.freq_base", 10000.0))
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
