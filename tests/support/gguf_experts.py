"""Tiny GGUF files of models with experts, written by gguf's own writer, and what they mean as floats by its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.gguf_files import DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, WIDE, add_tokenizer, random_blocks

EXPERTS, USED, LAYERS = 4, 2, 2
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
Value = str | int | float | bool | list[bool]
Fields = Mapping[str, Value]
NAMES = {  # of a layer's tensors: gguf's and Hugging Face's
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
MATRICES = {
    "attn_q": (HEADS * DIM, HIDDEN), "attn_k": (KV_HEADS * DIM, HIDDEN), "attn_v": (KV_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HEADS * DIM),
}  # fmt: skip
ROUTER = (EXPERTS, HIDDEN)
STACKS = {"ffn_gate_exps": (WIDE, HIDDEN), "ffn_up_exps": (WIDE, HIDDEN), "ffn_down_exps": (HIDDEN, WIDE)}


class ExpertFile:
    """A file that is being written. ``meant``: float32 weights by Hugging Face's names, each expert's by its own."""

    def __init__(self, path: Path, architecture: str, fields: Fields, seed: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.random = np.random.default_rng(seed)
        self.meant: dict[str, torch.Tensor] = {}
        self._writer = gguf.GGUFWriter(str(path), architecture)
        adders: dict[type, Callable[..., None]] = {
            str: self._writer.add_string,
            bool: self._writer.add_bool,
            float: self._writer.add_float32,
            list: self._writer.add_array,
        }
        for name, value in fields.items():
            adders.get(type(value), self._writer.add_uint32)(f"{architecture}.{name}", value)

    def add(self, name: str, meaning: str, shape: tuple[int, ...], kind: Kind) -> None:
        """A random tensor of ``kind``; one of 3 dimensions is of all experts, whose number ``*`` in meaning stands
        for."""
        if kind in FLOATS:
            drawn = self.random.standard_normal(shape) * (1.0 if "gate_inp" in name or "exp_probs" in name else 0.05)
        if kind is Kind.BF16:
            made = torch.from_numpy(drawn).bfloat16()
            values = made.float()
            self._writer.add_tensor(name, made.view(torch.uint8).numpy(), raw_dtype=kind)
        elif kind in FLOATS:
            stored = drawn.astype(np.float32 if kind is Kind.F32 else np.float16)
            values = torch.from_numpy(stored.astype(np.float32))
            self._writer.add_tensor(name, stored)
        else:
            rows = self._blocks(kind, int(np.prod(shape[:-1])), shape[-1])
            values = torch.from_numpy(gguf.quants.dequantize(rows, kind).copy()).view(shape)
            self._writer.add_tensor(name, rows.reshape(*shape[:-1], -1), raw_dtype=kind)
        if "*" not in meaning:
            self.meant[meaning] = values
            return
        self.meant |= {meaning.replace("*", str(expert)): values[expert].clone() for expert in range(shape[0])}

    def _blocks(self, kind: Kind, rows: int, columns: int) -> npt.NDArray[np.uint8]:
        if kind is not Kind.MXFP4:
            return random_blocks(kind, rows, columns, self.random)
        blocks = self.random.integers(0, 256, (rows * columns // 32, 17), dtype=np.uint8)
        blocks[:, 0] = self.random.integers(118, 124, len(blocks))  # an exponent, of 127 for 1
        return blocks.reshape(rows, -1)

    def norm(self, name: str, meaning: str, size: int) -> None:
        """The weight of a norm."""
        self.vector(name, meaning, self.random.random(size).astype(np.float32) + 0.5)

    def vector(self, name: str, meaning: str, values: npt.NDArray[np.float32]) -> None:
        """These numbers."""
        self._writer.add_tensor(name, values)
        self.meant[meaning] = torch.from_numpy(values)

    def close(self, tokenizer: str | Callable[[gguf.GGUFWriter], None] = "qwen2") -> dict[str, torch.Tensor]:
        """Write it, with a tokenizer of bytes by its pre-tokenizer, or another. Returns what is meant."""
        if isinstance(tokenizer, str):
            add_tokenizer(self._writer, tokenizer)
        else:
            tokenizer(self._writer)
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()
        return self.meant


def shape_fields(fields: Fields) -> dict[str, Value]:
    """Fields of the tiny shape, changed by ``fields``."""
    whole: dict[str, Value] = {
        "context_length": 128, "embedding_length": HIDDEN, "block_count": LAYERS, "feed_forward_length": 3 * WIDE,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM,
        "attention.value_length": DIM, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0,
        "expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": WIDE,
    }  # fmt: skip
    return whole | dict(fields)


def write_qwen3moe(
    path: Path,
    kind: Kind,
    fields: Fields | None = None,
    *,
    down: Kind | None = None,
    left_out: str = "",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    head_dim: int = DIM,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """A qwen3moe whose matrices are of ``kind``, those of ``down`` of another. Returns its weights. left_out: a tensor
    of layer 1. shapes: of a layer's tensors, where they are other ones."""
    file = ExpertFile(path, "qwen3moe", shape_fields(fields or {}), seed)
    for name in ("token_embd", "output"):
        file.add(f"{name}.weight", f"{TOP_NAMES[name]}.weight", (VOCAB, HIDDEN), kind)
    file.norm("output_norm.weight", "model.norm.weight", HIDDEN)
    stacks = {name: (EXPERTS, *shape) for name, shape in STACKS.items()}
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, shape in {**MATRICES, "ffn_gate_inp": ROUTER, **stacks, **(shapes or {})}.items():
            if layer == 1 and name == left_out:
                continue
            own = Kind.F32 if name == "ffn_gate_inp" else down if down and name == "ffn_down_exps" else kind
            meaning = f"mlp.experts.*.{OF_EXPERTS[name]}" if name in OF_EXPERTS else NAMES.get(name, name)
            file.add(f"{ours}.{name}.weight", f"{theirs}.{meaning}.weight", shape, own)
        norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_q_norm": head_dim, "attn_k_norm": head_dim}
        for name, size in norms.items():
            file.norm(f"{ours}.{name}.weight", f"{theirs}.{NAMES[name]}.weight", size)
    return file.close()


def write_gpt_oss(
    path: Path,
    kind: Kind,
    experts: Kind = Kind.MXFP4,
    fields: Fields | None = None,
    *,
    up: Kind | None = None,
    window: int = 5,
    count: int = EXPERTS,
    seed: int = 3,
) -> dict[str, torch.Tensor]:
    """A gpt-oss whose matrices are of ``kind``, those of its ``count`` ``experts``, and of their ``up``, of others.
    Returns its weights, each expert's by its own name."""
    own: dict[str, Value] = {
        "attention.sliding_window": window, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32, "rope.freq_base": 150000.0, "expert_count": count,
    }  # fmt: skip
    file = ExpertFile(path, "gpt-oss", shape_fields(own | dict(fields or {})), seed)
    for name in ("token_embd", "output"):
        file.add(f"{name}.weight", f"{TOP_NAMES[name]}.weight", (VOCAB, HIDDEN), kind)
    file.norm("output_norm.weight", "model.norm.weight", HIDDEN)
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        for name, shape in MATRICES.items():
            file.add(f"{ours}.{name}.weight", f"{theirs}.{NAMES[name]}.weight", shape, kind)
            file.add(f"{ours}.{name}.bias", f"{theirs}.{NAMES[name]}.bias", shape[:1], Kind.F32)
        file.add(f"{ours}.ffn_gate_inp.weight", f"{theirs}.mlp.router.weight", (count, HIDDEN), Kind.F32)
        file.add(f"{ours}.ffn_gate_inp.bias", f"{theirs}.mlp.router.bias", (count,), Kind.F32)
        for name, shape in STACKS.items():
            meaning = f"{theirs}.mlp.experts.*.{OF_EXPERTS[name]}"
            file.add(
                f"{ours}.{name}.weight",
                f"{meaning}.weight",
                (count, *shape),
                up or experts if "up" in name else experts,
            )
            file.add(f"{ours}.{name}.bias", f"{meaning}.bias", (count, shape[0]), Kind.F32)
        file.norm(f"{ours}.attn_sinks.weight", f"{theirs}.self_attn.sinks", HEADS)
        file.norm(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", HIDDEN)
        file.norm(f"{ours}.post_attention_norm.weight", f"{theirs}.post_attention_layernorm.weight", HIDDEN)
    return file.close("gpt-4o")


GLM_LAYERS, GLM_DENSE, SHARED = 3, 1, 2  # layers of a tiny glm4moe, of them dense ones; experts that always run
GLM_NAMES = NAMES | {
    "post_attention_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
GLM_FIELDS: Fields = {
    "block_count": GLM_LAYERS, "leading_dense_block_count": GLM_DENSE, "expert_shared_count": SHARED,
    "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.5, "rope.dimension_count": DIM // 2,
}  # fmt: skip


def write_glm4moe(
    path: Path,
    kind: Kind,
    fields: Fields | None = None,
    *,
    qk_norm: bool = True,
    modules: int = 0,
    experts: int = EXPERTS,
    seed: int = 5,
) -> dict[str, torch.Tensor]:
    """A glm4moe whose matrices are of ``kind``. Returns its weights without those of its MTP ``modules``, which are
    layers after the last."""
    own = {**GLM_FIELDS, "block_count": GLM_LAYERS + modules, "nextn_predict_layers": modules, "expert_count": experts}
    file = ExpertFile(path, "glm4moe", shape_fields({**own, **(fields or {})}), seed)
    for name in ("token_embd", "output"):
        file.add(f"{name}.weight", f"{TOP_NAMES[name]}.weight", (VOCAB, HIDDEN), kind)
    file.norm("output_norm.weight", "model.norm.weight", HIDDEN)
    for layer in range(GLM_LAYERS + modules):
        _add_glm_layer(file, layer, kind, qk_norm, experts)
    meant = file.close("gpt-4o")
    return {name: weight for name, weight in meant.items() if not name.startswith(f"model.layers.{GLM_LAYERS}")}


def mlp_shapes(shared: int) -> dict[str, tuple[int, int]]:
    """Matrices of so many shared experts together, or of a layer's one MLP: 0."""
    wide, last = (shared * WIDE, "_shexp") if shared else (3 * WIDE, "")
    shapes = {"ffn_gate": (wide, HIDDEN), "ffn_up": (wide, HIDDEN), "ffn_down": (HIDDEN, wide)}
    return {name + last: shape for name, shape in shapes.items()}


def _add_glm_layer(file: ExpertFile, layer: int, kind: Kind, qk_norm: bool, experts: int) -> None:
    ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
    mlp = mlp_shapes(SHARED if layer >= GLM_DENSE else 0)
    if layer >= GLM_DENSE:
        for name, shape in STACKS.items():
            file.add(
                f"{ours}.{name}.weight", f"{theirs}.mlp.experts.*.{OF_EXPERTS[name]}.weight", (experts, *shape), kind
            )
        file.add(f"{ours}.ffn_gate_inp.weight", f"{theirs}.mlp.gate.weight", (experts, HIDDEN), Kind.F32)
        file.add(f"{ours}.exp_probs_b.bias", f"{theirs}.mlp.gate.e_score_correction_bias", (experts,), Kind.F32)
    for name, shape in {**MATRICES, **mlp}.items():
        file.add(f"{ours}.{name}.weight", f"{theirs}.{GLM_NAMES[name]}.weight", shape, kind)
    for name in ("attn_q", "attn_k", "attn_v"):
        file.add(f"{ours}.{name}.bias", f"{theirs}.{NAMES[name]}.bias", MATRICES[name][:1], Kind.F32)
    norms = {"attn_norm": HIDDEN, "post_attention_norm": HIDDEN}
    for name, size in (norms | ({"attn_q_norm": DIM, "attn_k_norm": DIM} if qk_norm else {})).items():
        file.norm(f"{ours}.{name}.weight", f"{theirs}.{GLM_NAMES[name]}.weight", size)
    if layer >= GLM_LAYERS:
        file.add(f"{ours}.nextn.eh_proj.weight", f"{theirs}.eh_proj.weight", (HIDDEN, 2 * HIDDEN), kind)
