"""Tiny quantised checkpoints, made from their formats' definitions.

Numbers are drawn, written down plainly, and kept beside what they mean: a reader is compared with the numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer

HIDDEN, WIDE, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 1
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": CHAT_VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 256, "hidden_act": "silu", "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


@dataclass
class Drawn:
    """One layer as drawn: its tensors by the last part of their name, and element by element what they mean."""

    tensors: Tensors
    weight: torch.Tensor  # float32 [out_features, in_features]
    codes: torch.Tensor | None = None  # centred, as QuantizedWeight has them; None for floats
    extra: Tensors = field(default_factory=dict)


Draw = Callable[[int, int, torch.Generator], Drawn]


def words_of(codes: list[list[int]], bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Rows of codes from 0 as rows of 32-bit words, lowest bits first; places: which of a word's codes lies where."""
    per = 32 // bits
    order = places or tuple(range(per))
    rows = []
    for row in codes:
        row = row + [0] * (-len(row) % per)
        words = [sum(row[i + order[j]] << (bits * j) for j in range(per)) for i in range(0, len(row), per)]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def _whole(low: int, high: int, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=random)


def _scales(shape: tuple[int, ...], random: torch.Generator, bits: int) -> torch.Tensor:
    return ((torch.rand(shape, generator=random) + 0.5) * 0.35 / (1 << (bits - 2))).half()


def _spread(table: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """[rows, groups] -> [rows, columns], by loops."""
    return torch.stack([table[:, k // group] for k in range(columns)], dim=1)


def _order(columns: int, group: int, random: torch.Generator | None) -> torch.Tensor:
    """The group of each input feature, as a writer that took the features in a random order leaves it."""
    order = torch.tensor([k // group for k in range(columns)], dtype=torch.int32)
    return order if random is None else order[torch.randperm(columns, generator=random)]


def _ordered(scales: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[rows, columns], by loops."""
    columns = [scales[:, g] * (codes[:, k] - zeros[:, g]) for k, g in enumerate(order.tolist())]
    return torch.stack(columns, dim=1)


def gptq(bits: int, group: int, *, sym: bool, v2: bool = False, order: bool = True, act: bool = False) -> Draw:
    """AutoGPTQ's layout; order: with g_idx and a bias of zeros, as its writer leaves them; act: groups out of order."""

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        top, groups = (1 << bits) - 1, -(-columns // group)
        codes, scales = _whole(0, top, (rows, columns), random), _scales((rows, groups), random, bits)
        middle = torch.full((rows, groups), (top + 1) // 2)
        zeros = middle if sym else _whole(1, top, (rows, groups), random)
        stored = zeros if v2 else zeros - 1
        tensors = {
            "qweight": words_of(codes.tolist(), bits).t().contiguous(),
            "qzeros": words_of(stored.t().tolist(), bits),
            "scales": scales.t().contiguous(),
        }
        if order:
            tensors["g_idx"] = _order(columns, group, random if act else None)
            tensors["bias"] = torch.zeros(rows, dtype=torch.float16)
        if act:
            return Drawn(tensors, _ordered(scales.float(), codes, zeros, tensors["g_idx"]))
        weight = _spread(scales.float(), group, columns) * (codes - _spread(zeros, group, columns))
        return Drawn(tensors, weight, codes - (top + 1) // 2)

    return draw


def awq(group: int) -> Draw:
    """AutoAWQ's gemm layout: of eight output features, word by word, 0 2 4 6 1 3 5 7."""
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        groups = -(-columns // group)
        codes, zeros = _whole(0, 15, (rows, columns), random), _whole(0, 15, (rows, groups), random)
        scales = _scales((rows, groups), random, 4)
        tensors = {
            "qweight": words_of(codes.t().tolist(), 4, places),
            "qzeros": words_of(zeros.t().tolist(), 4, places),
            "scales": scales.t().contiguous(),
        }
        return Drawn(
            tensors, _spread(scales.float(), group, columns) * (codes - _spread(zeros, group, columns)), codes - 8
        )

    return draw


def packed(bits: int, group: int, *, zeros: bool, act: bool = False) -> Draw:
    """compressed-tensors' pack-quantized: signed codes and zero points, each written with 2^(bits-1) added; act: groups
    out of order."""

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        middle, size = 1 << (bits - 1), group if group > 0 else columns
        groups = -(-columns // size)
        codes, scales = _whole(-middle, middle - 1, (rows, columns), random), _scales((rows, groups), random, bits)
        points = (
            _whole(-middle, middle - 1, (rows, groups), random)
            if zeros
            else torch.zeros(rows, groups, dtype=torch.int64)
        )
        tensors = {
            "weight_packed": words_of((codes + middle).tolist(), bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if zeros:
            tensors["weight_zero_point"] = words_of((points + middle).t().tolist(), bits).t().contiguous()
        if act:
            tensors["weight_g_idx"] = _order(columns, size, random)
            return Drawn(tensors, _ordered(scales.float(), codes, points, tensors["weight_g_idx"]))
        return Drawn(tensors, _spread(scales.float(), size, columns) * (codes - _spread(points, size, columns)), codes)

    return draw


def int8(*, zeros: bool = False, per_tensor: bool = False) -> Draw:
    """compressed-tensors' int-quantized."""

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        codes = _whole(-127, 127, (rows, columns), random)
        scales = _scales((1,) if per_tensor else (rows, 1), random, 8)
        tensors = {"weight": codes.to(torch.int8), "weight_scale": scales}
        points = torch.zeros(rows, 1, dtype=torch.int8)
        if zeros:
            points = tensors["weight_zero_point"] = _whole(-20, 20, (rows, 1), random).to(torch.int8)
        return Drawn(tensors, scales.float().view(-1, 1) * (codes - points), codes)

    return draw


def fp8(block: tuple[int, int] | None, scale: str, *, per_tensor: bool = False) -> Draw:
    """float8_e4m3fn with scales of blocks, rows or the whole."""

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        codes = (torch.randn(rows, columns, generator=random) * 60).to(torch.float8_e4m3fn)
        blocks = (-(-rows // block[0]), -(-columns // block[1])) if block else (1,) if per_tensor else (rows, 1)
        scales = (torch.rand(blocks, generator=random) + 0.5) * 0.005
        weight = codes.float()
        for n in range(rows):
            for k in range(0, columns, block[1] if block else columns):
                one = scales[n // block[0], k // block[1]] if block else scales.view(-1)[0 if per_tensor else n]
                weight[n, k : k + (block[1] if block else columns)] *= one
        return Drawn({"weight": codes, scale: scales}, weight, codes)

    return draw


def fp4(group: int, *, has_global: bool, modelopt: bool = False) -> Draw:
    """compressed-tensors' nvfp4 (float8 scales, over one number of the tensor) or mxfp4 (exponents above 127), and
    modelopt's (float8 scales, times one number of the tensor)."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([numbers, -numbers])

    def draw(rows: int, columns: int, random: torch.Generator) -> Drawn:
        codes, groups = _whole(0, 15, (rows, columns), random), -(-columns // group)
        low, high = codes[:, 0::2], codes[:, 1::2]
        tensors = {"weight_packed": (low + 16 * high).to(torch.uint8)}
        if has_global:
            divisor = torch.tensor([61.7])  # float16 holds no scale over it
            scales = ((torch.rand(rows, groups, generator=random) + 0.5) * 4).to(torch.float8_e4m3fn)
            tensors |= {"weight_scale": scales, "weight_global_scale": divisor, "input_global_scale": divisor / 2}
            means = scales.float() / divisor
            if modelopt:
                tensors = {"weight": tensors["weight_packed"], "weight_scale": scales, "weight_scale_2": 1 / divisor[0]}
                tensors["input_scale"] = torch.tensor(0.5)
        else:
            exponents = _whole(120, 124, (rows, groups), random)
            tensors["weight_scale"], means = exponents.to(torch.uint8), 2.0 ** (exponents - 127)
        return Drawn(tensors, _spread(means, group, columns) * numbers[codes], codes - 8)

    return draw


def floats(rows: int, columns: int, random: torch.Generator) -> Drawn:
    """A layer that is not quantised."""
    weight = (torch.randn(rows, columns, generator=random) * 0.3).bfloat16()
    return Drawn({"weight": weight}, weight.float())


def layer_shapes(times: int) -> dict[str, tuple[int, int]]:
    """Output and input features of the linear layers."""
    hidden, wide = times * HIDDEN, times * WIDE
    size = hidden // HEADS * KV_HEADS
    shapes = {"q": (hidden, hidden), "k": (size, hidden), "v": (size, hidden), "o": (hidden, hidden)}
    named = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    mlp = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    return named | {f"mlp.{name}_proj": shape for name, shape in mlp.items()}


def write_quantised(
    folder: Path, config: dict[str, Any], draw: Callable[[str], Draw], times: int = 1
) -> dict[str, Drawn]:
    """A whole folder whose layers ``draw`` names by their name, with ``config`` as its quantization_config. times: how
    much wider than HIDDEN and WIDE its layers are.

    Returns the layers; ``write_floats`` writes the same model as floats.
    """
    random = torch.Generator().manual_seed(3)
    layers = {
        f"model.layers.{i}.{name}": draw(name)(*shape, random)
        for i in range(LAYERS)
        for name, shape in layer_shapes(times).items()
    }
    stored = {f"{name}.{part}": tensor for name, layer in layers.items() for part, tensor in layer.tensors.items()}
    _write(folder, stored | _rest(times), _config(times) | {"quantization_config": config})
    return layers


def write_floats(folder: Path, layers: dict[str, Drawn], times: int = 1) -> Path:
    """The model of ``write_quantised`` with the weights that its codes mean, in float32."""
    _write(folder, {f"{name}.weight": layer.weight for name, layer in layers.items()} | _rest(times), _config(times))
    return folder


def quantise_folder(
    folder: Path, config: dict[str, Any], draw: Callable[[str], Draw | None], *, meant: bool = False
) -> None:
    """Put codes in place of the matrices of ``folder`` for whose layers ``draw`` gives something by their name.

    The codes are drawn, whatever lay there. meant: put what they mean, in float32.
    """
    (file,) = folder.glob("*.safetensors")
    random, tensors = torch.Generator().manual_seed(2), Tensors()
    for name, tensor in load_file(file).items():
        layer = name.removesuffix(".weight")
        drawing = draw(layer) if tensor.ndim == 2 else None
        if drawing is None:
            tensors.setdefault(name, tensor.clone())
            continue
        drawn = drawing(tensor.shape[0], tensor.shape[1], random)
        parts = {"weight": drawn.weight} if meant else drawn.tensors
        tensors |= {f"{layer}.{part}": stored.contiguous() for part, stored in parts.items()}
    save_file(tensors, file)
    if not meant:
        raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(raw))


def _config(times: int) -> dict[str, Any]:
    return CONFIG | {"hidden_size": times * HIDDEN, "intermediate_size": times * WIDE}


def _rest(times: int) -> Tensors:
    random = torch.Generator().manual_seed(4)
    table = torch.randn(CHAT_VOCAB, times * HIDDEN, generator=random)
    rest = {"model.embed_tokens.weight": table, "lm_head.weight": table.flip(0) * 0.2, "model.norm.weight": None}
    for i in range(LAYERS):
        for name in ("input", "post_attention"):
            rest[f"model.layers.{i}.{name}_layernorm.weight"] = None
    return {
        name: torch.ones(times * HIDDEN) if tensor is None else tensor.contiguous() for name, tensor in rest.items()
    }


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    write_chat_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group of all linear layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    } | more  # fmt: skip
