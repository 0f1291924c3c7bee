"""Tiny GGUF files of DeepSeek-V3 as llama.cpp's converter writes them, and what they mean as floats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind

from tests.support.gguf_experts import (
    FLOATS,
    OF_EXPERTS,
    STACKS,
    TOP_NAMES,
    ExpertFile,
    Value,
    mlp_shapes,
    shape_fields,
)
from tests.support.gguf_files import HEADS, HIDDEN, VOCAB

LAYERS, DENSE, EXPERTS, GROUPS, SHARED = 3, 1, 8, 4, 1
RANK, NOPE, ROPE, VALUE = 256, 32, 16, 64  # of the latent and of queries; of a head
NAMES = {  # of a layer's tensors: llama.cpp's and Hugging Face's
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "keys", "attn_v_b": "values", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
WHOLE = {"attn_kv_b": (HEADS * (NOPE + VALUE), RANK)}
PARTS = {"attn_k_b": (HEADS, RANK, NOPE), "attn_v_b": (HEADS, VALUE, RANK)}
QUERIES = {"attn_q_a": (RANK, HIDDEN), "attn_q_b": (HEADS * (NOPE + ROPE), RANK)}
ONE_QUERY = {"attn_q": (HEADS * (NOPE + ROPE), HIDDEN)}
FIELDS: Mapping[str, Value] = {
    "leading_dense_block_count": DENSE, "attention.kv_lora_rank": RANK, "rope.dimension_count": ROPE,
    "expert_shared_count": SHARED, "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
    "expert_group_count": GROUPS, "expert_group_used_count": 2,
}  # fmt: skip
OF_PARTS: Mapping[str, Value] = {
    "attention.head_count_kv": 1, "attention.key_length": RANK + ROPE, "attention.value_length": RANK,
    "attention.key_length_mla": NOPE + ROPE, "attention.value_length_mla": VALUE,
}  # fmt: skip
OF_WHOLE: Mapping[str, Value] = {
    "attention.head_count_kv": HEADS, "attention.key_length": NOPE + ROPE, "attention.value_length": VALUE,
}  # fmt: skip


def write_deepseek2(
    path: Path,
    kind: Kind,
    fields: Mapping[str, Value | None] | None = None,
    *,
    whole: bool = False,
    query_rank: bool = True,
    modules: int = 0,
    experts: int = EXPERTS,
    left_out: str = "",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 9,
) -> dict[str, torch.Tensor]:
    """A deepseek2 whose matrices are of ``kind``. Returns its weights without those of its MTP ``modules``, which are
    layers after the last. whole: kv_b_proj is one tensor, as in old files. query_rank: queries are projected twice.
    left_out: a tensor of layer 1. shapes: of tensors of each layer that are there besides, or in another shape. A field
    that is None is left out."""
    own: dict[str, Value | None] = {
        **FIELDS,
        **(OF_WHOLE if whole else OF_PARTS),
        "block_count": LAYERS + modules,
        "expert_count": experts,
    }
    own |= {"attention.q_lora_rank": RANK if query_rank else None, "nextn_predict_layers": modules or None}
    given = {**shape_fields({}), **own, **(fields or {})}
    file = ExpertFile(path, "deepseek2", {name: value for name, value in given.items() if value is not None}, seed)
    for name in ("token_embd", "output"):
        file.add(f"{name}.weight", f"{TOP_NAMES[name]}.weight", (VOCAB, HIDDEN), kind)
    file.norm("output_norm.weight", "model.norm.weight", HIDDEN)
    attention = {**(WHOLE if whole else PARTS), **(QUERIES if query_rank else ONE_QUERY), **(shapes or {})}
    for layer in range(LAYERS + modules):
        _add_layer(file, layer, kind, attention, experts, left_out if layer == 1 else "")
    meant = file.close("deepseek-v3")
    return {name: weight for name, weight in meant.items() if not name.startswith(f"model.layers.{LAYERS}")}


def _add_layer(
    file: ExpertFile, layer: int, kind: Kind, matrices: dict[str, tuple[int, ...]], experts: int, left_out: str
) -> None:
    ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
    mlp = mlp_shapes(SHARED if layer >= DENSE else 0)
    if layer >= DENSE:
        for name, of_one in STACKS.items():
            meaning = f"{theirs}.mlp.experts.*.{OF_EXPERTS[name]}.weight"
            file.add(f"{ours}.{name}.weight", meaning, (experts, *of_one), kind)
        file.add(f"{ours}.ffn_gate_inp.weight", f"{theirs}.mlp.gate.weight", (experts, HIDDEN), Kind.F32)
        if left_out != "exp_probs_b":
            file.add(f"{ours}.exp_probs_b.bias", f"{theirs}.mlp.gate.e_score_correction_bias", (experts,), Kind.F32)
    low = {"attn_kv_a_mqa": (RANK + ROPE, HIDDEN), "attn_output": (HIDDEN, HEADS * VALUE)}
    for name, shape in {**low, **matrices, **mlp}.items():
        if name == left_out:
            continue
        narrow = shape[-1] % 256 and kind not in FLOATS  # no block of 256 fits: llama.cpp takes another type
        file.add(f"{ours}.{name}.weight", f"{theirs}.{NAMES[name]}.weight", shape, Kind.Q8_0 if narrow else kind)
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN, "attn_kv_a_norm": RANK}
    for name, size in (norms | ({"attn_q_a_norm": RANK} if "attn_q_a" in matrices else {})).items():
        file.norm(f"{ours}.{name}.weight", f"{theirs}.{NAMES[name]}.weight", size)
    _join(file.meant, theirs)
    if layer >= LAYERS:
        file.add(f"{ours}.nextn.eh_proj.weight", f"{theirs}.eh_proj.weight", (HIDDEN, 2 * HIDDEN), kind)


def _join(meant: dict[str, torch.Tensor], layer: str) -> None:
    """Row by row: a head's keys, each a column of its part, then its values."""
    keys, values = meant.pop(f"{layer}.keys.weight", None), meant.pop(f"{layer}.values.weight", None)
    if keys is None or values is None or keys.dim() < 3:
        return
    rows = []
    for head in range(HEADS):
        rows += [keys[head, :, row] for row in range(keys.shape[2])]
        rows += [values[head, row] for row in range(values.shape[1])]
    meant[f"{layer}.self_attn.kv_b_proj.weight"] = torch.stack(rows)
