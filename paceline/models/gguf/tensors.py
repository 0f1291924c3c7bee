"""The tensors of a GGUF file under the names and in the order of rows of a Hugging Face checkpoint.

llama.cpp interleaves the rows of q and k of the Llama architecture for its rope; Hugging Face rotates halves. The
interleave is undone here. All experts of a layer lie in one tensor, one after the other; each is a weight here.
DeepSeek's kv_b_proj may lie in two tensors, which are one weight of floats here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from paceline.errors import ConfigError
from paceline.layers.quantized import LinearWeight
from paceline.models.gguf.blocks import IN_CODES
from paceline.models.gguf.fields import Fields
from paceline.models.gguf.file import GgufFile, GgufTensor
from paceline.models.gguf.latent import joined, part_shapes
from paceline.models.gguf.matrices import weight_of_blocks
from paceline.models.quantization.fusing import reordered

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
NORMED = ATTENTION | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
DENSE = NORMED | MLP
EACH = "*"  # in a name: the number of an expert
EXPERTS = {
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
SINKS, CORRECTION = "attn_sinks", "exp_probs_b"
LONE = (SINKS, CORRECTION)  # no weights of layers: their names have no last part
AFTER = {"post_attention_norm": "post_attention_layernorm"}
OSS = AFTER | {"ffn_gate_inp": "mlp.router", SINKS: "self_attn.sinks"}
GROUPED = {
    "ffn_gate_inp": "mlp.gate",
    CORRECTION: "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GLM = AFTER | GROUPED | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
WHOLE, KEYS, VALUES = "self_attn.kv_b_proj.weight", "self_attn.k_b_proj.weight", "self_attn.v_b_proj.weight"
DEEPSEEK = GROUPED | {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # these two are parts of the one above
    "attn_v_b": "self_attn.v_b_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA = AFTER | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYER_NAMES = {  # of the other architectures: DENSE
    "qwen3moe": NORMED | EXPERTS | {"ffn_gate_inp": "mlp.gate"},
    "gpt-oss": ATTENTION | EXPERTS | OSS,
    "glm4moe": ATTENTION | MLP | EXPERTS | GLM,
    "gemma3": ATTENTION | MLP | GEMMA,
    "deepseek2": MLP | EXPERTS | DEEPSEEK,
}
SHIFTED_NORMS = ("gemma3",)  # architectures whose norms multiply by one more than a checkpoint has
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
UNREAD = {"gemma3": ("v.", "mm.")}  # tensors of images, by the beginnings of their names
ROPE_FACTORS = "rope_freqs.weight"  # no weight: how far rope is stretched, see convert
INTERLEAVED = {"attn_q": "head_count", "attn_k": "head_count_kv"}
_Q = GGMLQuantizationType
PLAIN = (_Q.F32, _Q.F16, _Q.BF16)


def hugging_face_name(name: str, architecture: str = "llama") -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. EACH stands for an expert where a tensor
    has those of all. Raises ConfigError for names that the architecture does not have."""
    stem, _, last = name.rpartition(".")
    if stem in TOP_NAMES and last == "weight":
        return f"{TOP_NAMES[stem]}.weight"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    names = LAYER_NAMES.get(architecture, DENSE)
    if block != "blk" or not layer.isdecimal() or part not in names or last not in ("weight", "bias"):
        raise ConfigError("model", f"GGUF tensor {name} is not one of the architecture {architecture}")
    whole = f"model.layers.{layer}.{names[part]}"
    return whole if part in LONE else f"{whole}.{last}"


def row_order(rows: int, heads: int) -> torch.Tensor:
    """Where in llama.cpp's order (pairs) each row of rotate-half (halves) lies; int64 [rows], of ``heads`` heads."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class _Place:
    """Where a weight lies: in a tensor, of which it is one expert's part or, with None, all. With ``values`` the tensor
    has the keys' part of it."""

    tensor: GgufTensor
    expert: int | None = None
    values: GgufTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        if self.values is not None:
            (heads, rank, keys), (_, values, _) = self.tensor.shape, self.values.shape
            return heads * (keys + values), rank
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def rows(self, file: GgufFile) -> npt.NDArray[np.uint8]:
        """Its bytes, [rows, bytes of a row]. No other expert's are read."""
        rows = file.rows(self.tensor)
        if self.expert is None:
            return rows
        each = rows.shape[0] // self.tensor.shape[0]
        return rows[self.expert * each : (self.expert + 1) * each]


class GgufTensors(Mapping[str, LinearWeight]):
    """Weights by their Hugging Face names, each read when it is asked for: quantised as they lie in the file, or in
    ``dtype``."""

    def __init__(self, file: GgufFile, dtype: torch.dtype) -> None:
        """Raises ConfigError naming a tensor, or a type, that is not known here, and a tensor of all experts that is
        not one of as many as the file says."""
        self._file, self._dtype, self._fields = file, dtype, Fields(file)
        unread = UNREAD.get(self._fields.architecture, ())
        read = [t for t in file.tensors.values() if t.name != ROPE_FACTORS and not t.name.startswith(unread)]
        tensors = [tensor for tensor in read if not self._is_of_module(tensor)]
        kinds = {tensor.kind for tensor in tensors}
        if unknown := sorted(kind.name for kind in kinds if kind not in (*PLAIN, *IN_CODES)):
            known = ", ".join(kind.name for kind in (*PLAIN, *IN_CODES))
            raise ConfigError("model", f"{file.path.name} has tensors of {', '.join(unknown)}, supported are {known}")
        self._places: dict[str, _Place] = {}
        for tensor in tensors:
            self._place(tensor)
        self._join()
        self._heads = self._interleaved_heads()

    def _is_of_module(self, tensor: GgufTensor) -> bool:
        block, _, rest = tensor.name.partition(".")
        layer = rest.partition(".")[0]
        return block == "blk" and layer.isdecimal() and self._fields.is_module(int(layer))

    def _place(self, tensor: GgufTensor) -> None:
        name = hugging_face_name(tensor.name, self._fields.architecture)
        if EACH not in name:
            self._places[name] = _Place(tensor)
            return
        count, dims = self._fields.expert_count(), 3 if name.endswith(".weight") else 2
        if len(tensor.shape) != dims or tensor.shape[0] != count:
            raise self._fields.refused(f"tensor {tensor.name} has shape {tensor.shape}, expected {count} experts")
        self._places |= {name.replace(EACH, str(expert)): _Place(tensor, expert) for expert in range(count)}

    def _join(self) -> None:
        """Make one weight of the two parts of a projection. Raises ConfigError for one part alone, for parts beside the
        whole, and for other shapes than the file's fields give."""
        parts = {name: self._places.pop(name).tensor for name in [*self._places] if name.endswith((KEYS, VALUES))}
        for stem in dict.fromkeys(name.removesuffix(KEYS).removesuffix(VALUES) for name in parts):
            keys, values = parts.get(f"{stem}{KEYS}"), parts.get(f"{stem}{VALUES}")
            if keys is None or values is None:
                name = next(tensor.name for tensor in (keys, values) if tensor is not None)
                raise self._fields.refused(f"tensor {name} is one part of two, the other is missing")
            if f"{stem}{WHOLE}" in self._places:
                raise self._fields.refused(f"tensor {keys.name} is a part of a projection that is there as a whole too")
            for tensor, shape in zip((keys, values), part_shapes(self._fields), strict=True):
                if tensor.shape != shape:
                    raise self._fields.refused(f"tensor {tensor.name} has shape {tensor.shape}, expected {shape}")
            self._places[f"{stem}{WHOLE}"] = _Place(keys, values=values)

    def _interleaved_heads(self) -> dict[str, int]:
        """Heads of the tensors whose rows are interleaved, by the part of the name; Qwen's are not."""
        fields = self._fields
        if fields.architecture != "llama":
            return {}
        heads = fields.get("attention.head_count")
        counts: dict[str, int] = {}
        for part, key in INTERLEAVED.items():
            found = fields.get(f"attention.{key}")
            count = heads if found is None else found
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise fields.refused(f"{count!r} heads of {part} are not supported")
            counts[part] = count
        return counts

    def floats(self, name: str) -> torch.Tensor:
        """A tensor as float32, whatever its type."""
        place = self._places[name]
        values = _floats(place.rows(self._file), place.tensor.kind)
        if place.values is not None:
            other = _floats(self._file.rows(place.values), place.values.kind)
            return joined(values.view(place.tensor.shape), other.view(place.values.shape))
        values = values.view(place.shape)
        if self._fields.architecture in SHIFTED_NORMS and name.endswith("norm.weight"):
            return values - 1.0
        order = self._order(place.tensor)
        return values if order is None else values[order]

    def dtype_of(self, name: str) -> torch.dtype:
        """What a tensor of floats is given in."""
        return torch.float32 if name.endswith(GROUPED[CORRECTION]) else self._dtype  # see registry.KEPT_FLOAT32

    def _in_codes(self, place: _Place) -> bool:
        return place.tensor.kind in IN_CODES and len(place.shape) == 2 and place.values is None

    def _order(self, tensor: GgufTensor) -> torch.Tensor | None:
        part = tensor.name.split(".")[-2]
        if not (heads := self._heads.get(part)):
            return None
        if tensor.shape[0] % (2 * heads):
            raise ConfigError("model", f"GGUF tensor {tensor.name} has {tensor.shape[0]} rows for {heads} heads")
        return row_order(tensor.shape[0], heads)

    def __getitem__(self, name: str) -> LinearWeight:
        place = self._places[name]
        if not self._in_codes(place):
            return self.floats(name).to(self.dtype_of(name))
        weight = weight_of_blocks(place.rows(self._file), place.tensor.kind)
        order = self._order(place.tensor)
        return weight if order is None else reordered(weight, order)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _floats(rows: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    """float32 of a tensor's bytes, [rows, columns]."""
    plain = {_Q.F32: "<f4", _Q.F16: "<f2"}.get(kind)
    return torch.tensor(dequantize(rows.view(plain) if plain else rows, kind)).float()
