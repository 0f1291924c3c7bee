"""The tensors of a GGUF file under the names and in the order of rows of a Hugging Face checkpoint.

llama.cpp interleaves the rows of q and k of the Llama architecture for its rope; Hugging Face rotates halves. The
interleave is undone here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from paceline.errors import ConfigError
from paceline.layers.quantized import LinearWeight
from paceline.models.gguf.blocks import KEPT, weight_of_blocks
from paceline.models.gguf.file import GgufFile, GgufTensor
from paceline.models.quantization.fusing import reordered

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"  # no weight: how far rope is stretched, see convert
INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
_Q = GGMLQuantizationType
PLAIN = (_Q.F32, _Q.F16, _Q.BF16)


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. Raises ConfigError for others."""
    stem, _, last = name.rpartition(".")
    if stem in TOP_NAMES and last == "weight":
        return f"{TOP_NAMES[stem]}.weight"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or part not in LAYER_NAMES or last not in ("weight", "bias"):
        raise ConfigError("model", f"GGUF tensor {name} is not one of the Llama architecture")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{last}"


def row_order(rows: int, heads: int) -> torch.Tensor:
    """Where in llama.cpp's order (pairs) each row of rotate-half (halves) lies; int64 [rows], of ``heads`` heads."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


class GgufTensors(Mapping[str, LinearWeight]):
    """Weights by their Hugging Face names, each read when it is asked for: quantised as they lie in the file, or in
    ``dtype``."""

    def __init__(self, file: GgufFile, dtype: torch.dtype) -> None:
        """Raises ConfigError naming a tensor, or a type, that is not known here."""
        self._file, self._dtype = file, dtype
        tensors = [tensor for tensor in file.tensors.values() if tensor.name != ROPE_FACTORS]
        self._tensors = {hugging_face_name(tensor.name): tensor for tensor in tensors}
        kinds = {tensor.kind for tensor in tensors}
        if unknown := sorted(kind.name for kind in kinds if kind not in (*PLAIN, *KEPT)):
            known = ", ".join(kind.name for kind in (*PLAIN, *KEPT))
            raise ConfigError("model", f"{file.path.name} has tensors of {', '.join(unknown)}, supported are {known}")
        self._heads = self._interleaved_heads()

    def _interleaved_heads(self) -> dict[str, int]:
        """Heads of the tensors whose rows are interleaved, by the part of the name; Qwen's are not."""
        fields = self._file.fields
        if fields.get("general.architecture") != "llama":
            return {}
        heads = fields.get("llama.attention.head_count")
        counts: dict[str, int] = {}
        for part, key in INTERLEAVED.items():
            count = fields.get(f"llama.attention.{key}", heads)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError("model", f"{self._file.path.name}: {count!r} heads of {part} are not supported")
            counts[part] = count
        return counts

    def floats(self, name: str) -> torch.Tensor:
        """A tensor as float32, whatever its type."""
        tensor = self._tensors[name]
        values = torch.tensor(dequantize(self._stored(tensor), tensor.kind)).float().view(tensor.shape)
        order = self._order(tensor)
        return values if order is None else values[order]

    def _stored(self, tensor: GgufTensor) -> object:
        rows = self._file.rows(tensor)
        plain = {_Q.F32: "<f4", _Q.F16: "<f2"}.get(tensor.kind)
        return rows.view(plain) if plain else rows

    def _order(self, tensor: GgufTensor) -> torch.Tensor | None:
        part = tensor.name.split(".")[-2]
        if not (heads := self._heads.get(part)):
            return None
        if tensor.shape[0] % (2 * heads):
            raise ConfigError("model", f"GGUF tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        return row_order(tensor.shape[0], heads)

    def __getitem__(self, name: str) -> LinearWeight:
        tensor = self._tensors[name]
        if tensor.kind not in KEPT or len(tensor.shape) != 2:
            return self.floats(name).to(self._dtype)
        weight = weight_of_blocks(self._file.rows(tensor), tensor.kind)
        order = self._order(tensor)
        return weight if order is None else reordered(weight, order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
