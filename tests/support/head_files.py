"""Tiny draft heads in the public formats, written by hand from algorithms.md F, for `tiny_model`'s target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.tiny_model import VOCAB

HIDDEN = 64  # of the target
DRAFT_IDS = [3, 4, 9, 17, 31, 32, 80, 81, 150, 198]  # target ids of a draft vocabulary
HEADS, KV_HEADS, DIM, WIDE = 4, 2, 32, 80  # of a head, not the target's
LLAMA: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8,  # heads often name less than the target serves
}
Shapes = dict[str, tuple[int, ...]]


def fill(shapes: Shapes, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors: norms about 1, the rest scaled so that rows keep their size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = 1.0 + 0.3 * value if is_norm else value * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
    return tensors


def block_shapes(prefix: str, width: int, hidden: int = HIDDEN, heads: tuple[int, int, int] | None = None) -> Shapes:
    """Shapes of a decoder layer but for its norms before attention."""
    num, kv, dim = heads or (HEADS, KV_HEADS, DIM)
    shapes: Shapes = {
        "self_attn.q_proj.weight": (num * dim, width),
        "self_attn.k_proj.weight": (kv * dim, width),
        "self_attn.v_proj.weight": (kv * dim, width),
        "self_attn.o_proj.weight": (hidden, num * dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (WIDE, hidden),
        "mlp.up_proj.weight": (WIDE, hidden),
        "mlp.down_proj.weight": (hidden, WIDE),
    }
    return {f"{prefix}{name}": shape for name, shape in shapes.items()}


def put(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], file: str = "model.safetensors") -> Path:
    """Write a folder; ``.bin`` and ``.pt`` go through torch.save."""
    folder.mkdir(parents=True, exist_ok=True)
    if file.endswith("safetensors"):
        save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- EAGLE


def eagle1(**changes: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """F1. ``bias``: with fc.bias; other changes are the config's."""
    shapes = block_shapes("layers.0.", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if changes.get("bias"):
        shapes["fc.bias"] = (HIDDEN,)
    tensors = fill(shapes | {"embed_tokens.weight": (VOCAB, HIDDEN)}, 1)
    return tensors, LLAMA | {"architectures": ["LlamaForCausalLM"]} | changes


def vocabulary(ids: list[int] = DRAFT_IDS) -> dict[str, Tensor]:
    """d2t as offsets, t2d as a mask."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": torch.tensor([target - draft for draft, target in enumerate(ids)]), "t2d": mask}


def eagle3(
    hidden: int = HIDDEN, full_vocabulary: bool = False, num_aux: int = 3, **changes: Any
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """F2 of a head of width ``hidden``; ``changes`` are the config's."""
    draft_vocab = VOCAB if full_vocabulary else len(DRAFT_IDS)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    shapes = block_shapes("midlayer.", 2 * hidden, hidden) | {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {"fc.weight": (hidden, num_aux * HIDDEN), "lm_head.weight": (draft_vocab, hidden)}
    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab}
    if hidden != HIDDEN:
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
        config |= {"hidden_size": hidden, "target_hidden_size": HIDDEN}
    if changes.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_aux * HIDDEN,)
    if changes.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(num_aux)}
    if changes.get("attention_bias"):
        sizes = (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        shapes |= {f"midlayer.self_attn.{n}_proj.bias": (size * DIM,) for n, size in sizes}
    if changes.get("model_type") == "qwen3":
        shapes |= {f"midlayer.self_attn.{n}_norm.weight": (DIM,) for n in "qk"}
    return fill(shapes, 2) | ({} if full_vocabulary else vocabulary()), config | changes


def speculators(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """F2 to F3."""
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    top = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "target_hidden_size")
    nested = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
    ids = config.get(nested[1], config.get(nested[0], {}).get(nested[1]))
    return renamed, {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {name: value for name, value in config.items() if name not in top + nested},
        "eagle_aux_hidden_state_layer_ids": ids,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny"}},
    } | {name: config[name] for name in top if name in config}


# ---- Medusa


def medusa(num_heads: int = 3, num_blocks: int = 2, vocabulary_rows: int = VOCAB) -> dict[str, Tensor]:
    """F4, FasterDecoding's names; 0 rows: no vocabulary matrices."""
    shapes: Shapes = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes |= {f"{head}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{block}.linear.bias": (HIDDEN,)}
        if vocabulary_rows:
            shapes[f"{head}.{num_blocks}.weight"] = (vocabulary_rows, HIDDEN)
    return fill(shapes, 3)


def vllm_medusa() -> dict[str, Tensor]:
    """F4, vLLM's names, without biases, over a reduced vocabulary."""
    tensors: dict[str, Tensor] = {"token_map": torch.tensor(DRAFT_IDS)}
    for name, tensor in medusa(vocabulary_rows=len(DRAFT_IDS)).items():
        head, block, *rest = name.split(".")
        if rest == ["linear", "weight"]:
            tensors[f"blocks.{head}.layers.{block}.weight"] = tensor
        elif rest == ["weight"]:
            tensors[f"lm_heads.{head}.weight"] = tensor
    return tensors


# ---- MTP

TARGET = fill(
    {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (7, HIDDEN),
        "model.layers.0.mamba.conv.weight": (3, 3),
    },
    5,
)  # the main checkpoint around modules


def mtp_module(seed: int = 4) -> dict[str, Tensor]:
    """One module around the tiny target's own block, names after ``model.layers.N.``."""
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
    shapes = {f"{name}.weight": (HIDDEN,) for name in norms} | {"eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    return fill(shapes | block_shapes("", HIDDEN, heads=(4, 2, 16)), seed)


def mtp_config(num_layers: int, **changes: Any) -> dict[str, Any]:
    """config.json of the tiny target, whose MLP is as wide as the heads' here."""
    sizes = {"num_hidden_layers": num_layers, "head_dim": 16, "rope_theta": 10000.0, "num_nextn_predict_layers": 1}
    return LLAMA | sizes | changes


def at_layer(layer: int, module: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in module.items()}


def mimo() -> dict[str, Tensor]:
    """F7: other names, and the join reads the hidden row first."""
    module = mtp_module()
    weight = module.pop("eh_proj.weight")
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "shared_head.norm": "final_layernorm"}
    renamed = {names.get(n.removesuffix(".weight"), n.removesuffix(".weight")): t for n, t in module.items()}
    renamed["input_proj"] = torch.cat((weight[:, HIDDEN:], weight[:, :HIDDEN]), dim=1)
    return {f"model.mtp_layers.0.{name}.weight": tensor for name, tensor in renamed.items()}


def qwen() -> dict[str, Tensor]:
    """F8: other names, norms stored as the scale less 1."""
    own = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "shared_head.norm.weight": "mtp.norm.weight",
    }
    module = {name: t - 1.0 if "norm" in name else t for name, t in mtp_module().items()}
    return {own.get(name, f"mtp.layers.0.{name}"): tensor for name, tensor in module.items()}


MOE = {  # a module with experts, of which the reader knows no shapes
    **{name: tensor for name, tensor in mtp_module().items() if not name.startswith("mlp.")},
    **fill({"mlp.gate.weight": (2, HIDDEN), "mlp.gate.e_score_correction_bias": (2,)}),
    **fill({f"mlp.experts.{i}.{n}_proj.weight": (HIDDEN, HIDDEN) for i in (0, 1) for n in ("gate", "up", "down")}),
    **fill({f"mlp.shared_experts.{n}_proj.weight": (HIDDEN, HIDDEN) for n in ("gate", "up", "down")}),
}
COPIES = {
    "embed_tokens.weight": TARGET["model.embed_tokens.weight"],
    "shared_head.head.weight": TARGET["lm_head.weight"],
}
