"""MTP modules in the wild (algorithms.md F5 to F8) to DeepSeek-V3's names, which are canonical.

Whether inside a target's own checkpoint or in a folder of their own: DeepSeek-V3 and GLM-4.5 at the layers after the
target's last, "NextN" exports at layer 0, MiMo (its join reads the hidden row first: the halves are swapped; that row
is the target's before its final norm), Qwen3-Next and Qwen3.5 (their norms are stored as w for a scale of 1 + w).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from paceline.models.loader import HARMLESS
from paceline.spec_decode.heads.formats.config import MAX_MTP_MODULES, MtpConfig
from paceline.spec_decode.heads.formats.files import Entry, HeadFiles, check_names
from paceline.spec_decode.heads.formats.layer import LayerShape, number, refused

MODULE = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
MIMO = re.compile(r"^model\.mtp_layers\.(\d+)\.(.+)$")
QWEN = "mtp."
TARGET_NORM = re.compile(r"^model\.(language_model\.)?norm\.weight$")  # a whole model lies here, not heads alone
JOINT = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
BLOCK = re.compile(
    r"^((input|post_attention)_layernorm\.weight"
    r"|self_attn\.(q|k|v|o)_proj\.(weight|bias)|self_attn\.(q|k)_norm\.weight"
    r"|self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.(weight|bias)"
    r"|self_attn\.(q_a|kv_a)_layernorm\.weight"
    r"|mlp\.(gate|up|down)_proj\.(weight|bias)|mlp\.gate\.(weight|e_score_correction_bias)"
    r"|mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"
    r"|mlp\.shared_experts?\.(gate|up|down)_proj\.weight|mlp\.shared_expert_gate\.weight)$"
)
MIMO_NAMES = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
QWEN_NAMES = {
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
# Copies of the target's, which it shares with its modules.
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
GATE_UP_DOWN = tuple(f"{name}_proj.weight" for name in ("gate", "up", "down"))


def mtp_layers(names: Seq[str]) -> list[int]:
    """Layers at which modules lie under DeepSeek's names, ascending."""
    return sorted(int(m[1]) for m in map(MODULE.match, names) if m and m[2] == "eh_proj.weight")


def read_mtp(files: HeadFiles, first_layer: int | None) -> tuple[MtpConfig, dict[str, Entry], dict[str, Entry]]:
    """Config, tensors, and the copies of the target's embedding and LM head that came with them.

    first_layer: number of the first module in the canonical names, the target's layer count; None: as the files say.
    Raises ConfigError.
    """
    raw = _text_config(files.config)
    if any(MIMO.match(name) for name in files.names):
        modules, own = _mimo(files.names), number(raw, "num_hidden_layers")
    elif any(name.startswith(QWEN) for name in files.names):
        modules, own = _qwen(files.names), number(raw, "num_hidden_layers")
    else:
        modules, own = _deepseek(files.names)
    _refuse_strangers(files, modules)
    modules = [_without_zeros(module, files) for module in modules]
    _check_count(raw, len(modules), files)
    first = own if first_layer is None else first_layer
    entries: dict[str, Entry] = {}
    copies: dict[str, Entry] = {}
    for k, module in enumerate(modules):
        for name, entry in module.items():
            if name in COPIES:
                copies[f"{k}.{name}"] = entry
            else:
                entries[f"model.layers.{first + k}.{name}"] = entry
        _check_block([name for name in module if name not in COPIES], f"{files.folder} (MTP module {k})")
    config = MtpConfig(
        hidden_size=number(raw, "hidden_size"),
        first_layer=first,
        num_modules=len(modules),
        chained=bool(raw.get("mtp_chained", True)),
        shape=_shape(raw, list(modules[0])),
        reads_stream=any(MIMO.match(name) for name in files.names),
    )
    return config, entries, copies


def mtp_shapes(config: MtpConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors where the block is a plain decoder layer, else of those outside it."""
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(config.num_modules):
        shapes |= config.joint_shapes(k)
        if config.shape is not None:
            shapes |= config.shape.tensor_shapes(f"model.layers.{config.first_layer + k}", config.hidden_size)
    return shapes


# ---- the layouts


def _deepseek(names: Seq[str]) -> tuple[list[dict[str, Entry]], int]:
    """F5, F6 and NextN exports."""
    layers = mtp_layers(names)
    if not layers or layers != list(range(layers[0], layers[0] + len(layers))):
        raise refused(f"MTP modules must lie at layers one after another, found {layers}")
    modules: list[dict[str, Entry]] = [{} for _ in layers]
    for name in names:
        match = MODULE.match(name)
        if match and int(match[1]) in layers and not name.endswith(HARMLESS):
            modules[int(match[1]) - layers[0]][match[2]] = Entry(name)
    return modules, layers[0]


def _mimo(names: Seq[str]) -> list[dict[str, Entry]]:
    """F7."""
    modules: dict[int, dict[str, Entry]] = {}
    for name in names:
        if match := MIMO.match(name):
            canonical = MIMO_NAMES.get(match[2], match[2])
            change = _swap_halves if canonical == "eh_proj.weight" else None
            modules.setdefault(int(match[1]), {})[canonical] = Entry(name, change)
    if sorted(modules) != list(range(len(modules))):
        raise refused(f"MTP modules must be numbered from 0, found {sorted(modules)}")
    return [modules[k] for k in range(len(modules))]


def _qwen(names: Seq[str]) -> list[dict[str, Entry]]:
    """F8; several layers would share one join, which no target here has."""
    module: dict[str, Entry] = {}
    for name in names:
        if not name.startswith(QWEN):
            continue
        rest = name.removeprefix(QWEN)
        canonical = QWEN_NAMES.get(rest, rest.removeprefix("layers.0."))
        module[canonical] = Entry(name, _add_one if "norm" in canonical else None)
    return [module]


def _without_zeros(module: Mapping[str, Entry], files: HeadFiles) -> dict[str, Entry]:
    """The module less biases of zeros that no block has: GPTQ's writers put one beside every layer."""

    def adds_nothing(name: str, entry: Entry) -> bool:
        return name.endswith(".bias") and not BLOCK.match(name) and not bool(files.tensors[entry.source].any())

    return {name: entry for name, entry in module.items() if not adds_nothing(name, entry)}


def _swap_halves(weight: torch.Tensor) -> torch.Tensor:
    """[H, 2H] that reads (hidden, embedding) to one that reads (embedding, hidden)."""
    hidden, embedding = weight.chunk(2, dim=1)
    return torch.cat((embedding, hidden), dim=1)


def _add_one(weight: torch.Tensor) -> torch.Tensor:
    return weight + 1.0


# ---- checks


def _text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where models that also see keep the sizes of their language model."""
    nested = raw.get("text_config")
    return nested if isinstance(nested, dict) else raw


def _refuse_strangers(files: HeadFiles, modules: Seq[Mapping[str, Entry]]) -> None:
    """Every tensor of a folder of heads alone must be a module's; copies of the target's may lie beside them."""
    if any(TARGET_NORM.match(name) for name in files.names):
        return
    known = {entry.source for module in modules for entry in module.values()} | set(COPIES.values())
    check_names([name for name in files.names if name not in known], (), f"{files.folder} (MTP)")


def _check_count(raw: Mapping[str, Any], count: int, files: HeadFiles) -> None:
    said = raw.get("num_nextn_predict_layers", raw.get("mtp_num_hidden_layers", 1))
    if said != count or not 1 <= count <= MAX_MTP_MODULES:
        raise refused(
            f"{files.folder}: config.json says num_nextn_predict_layers {said}, the files hold {count} modules "
            f"(1 to {MAX_MTP_MODULES} are supported)"
        )


def _check_block(names: Seq[str], what: str) -> None:
    """Names of one module: nothing unknown, and everything that its kind of block needs."""
    have = set(names)
    attention = {"self_attn.o_proj.weight"}
    if "self_attn.kv_a_proj_with_mqa.weight" in have:
        latent = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        queries = ("q_a_proj", "q_a_layernorm", "q_b_proj") if "self_attn.q_a_proj.weight" in have else ("q_proj",)
        attention |= {f"self_attn.{name}.weight" for name in latent + queries}
    else:
        attention |= {f"self_attn.{name}_proj.weight" for name in "qkv"}
    if "mlp.gate.weight" in have:
        experts = {int(name.split(".")[2]) for name in have if name.startswith("mlp.experts.")}
        numbers = range(max(experts, default=0) + 1)
        mlp = {f"mlp.experts.{i}.{name}" for i in numbers for name in GATE_UP_DOWN} | {"mlp.gate.weight"}
    else:
        mlp = {f"mlp.{name}" for name in GATE_UP_DOWN}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    optional = {name for name in have if BLOCK.match(name)}
    check_names(have, optional | attention | mlp | norms | set(JOINT), what)


def _shape(raw: Mapping[str, Any], names: Seq[str]) -> LayerShape | None:
    """The shape of a plain decoder layer; None for latent attention, experts, and Qwen3-Next's gated queries."""
    special = "self_attn.kv_a_proj_with_mqa.weight" in names or "mlp.gate.weight" in names
    gated = raw.get("attn_output_gate") or str(raw.get("model_type", "")).startswith("qwen3_")
    if special or gated:
        return None
    return LayerShape.from_json(raw, [f"m.{name}" for name in names], "m")
