"""``paceline plan`` of quantised checkpoints: the bytes that a node holds, and bits a weight at published shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.assembly.model_plan import ModelPlan, plan_model
from paceline.assembly.planned_weights import gpu_bytes
from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.models.registry import load_target, open_checkpoint
from tests.models.quantization import test_checkpoints as quantised
from tests.support.needs import needs_kernels, needs_triton
from tests.support.quantised_files import Draw, awq, compressed, floats, packed, write_quantised

INDEXES = Path(__file__).parents[1] / "models" / "indexes"
Case = tuple[dict[str, Any], Callable[[str], Draw]]
BESIDE_FLOATS: Case = (quantised.AWQ, lambda name: floats if "gate" in name or "k_proj" in name else awq(32))
UNLIKE: Case = (
    compressed("mixed-precision", quantised.INT4),
    lambda name: packed(8, 16, zeros=False) if "up_proj" in name else packed(4, 32, zeros=False),
)
OF_16 = quantised.ROWS | {"strategy": "group", "group_size": 16}
UNLIKE[0]["config_groups"]["group_1"] = {"targets": ["re:.*up_proj"], "weights": OF_16}
# The types and shapes of k_proj and o_proj below are the same.
ONE_LAYOUT: Case = (
    compressed("mixed-precision", quantised.INT4),
    lambda name: packed(8, 16, zeros=False) if name[-6] in "qkv" else packed(4, 32, zeros=False),
)
ONE_LAYOUT[0]["config_groups"]["group_1"] = {"targets": ["re:.*[qkv]_proj"], "weights": OF_16}
CASES: dict[str, Case] = quantised.CASES | quantised.OF_128 | {"beside floats": BESIDE_FLOATS, "unlike": UNLIKE}
EXPERTS = (
    "fp8 blocks", "gptq 4 sym", "gptq 4 desc_act", "awq", "ct int8", "ct w4a16", "ct fp8", "ct nvfp4", "modelopt",
    "unlike", "one layout",
)  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def write_experts(folder: Path, config: dict[str, Any], draw: Callable[[str], Draw]) -> Path:
    """A tiny Qwen3-MoE whose linear layers are quantised."""
    random, tensors = torch.Generator().manual_seed(7), dict[str, torch.Tensor]()
    attention = {"q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    for i in range(2):
        layers = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
        for expert in range(16):
            mlp = {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
            layers |= {f"mlp.experts.{expert}.{name}_proj": shape for name, shape in mlp.items()}
        for name, shape in layers.items():
            drawn = draw(name)(*shape, random).tensors
            tensors |= {f"model.layers.{i}.{name}.{last}": tensor for last, tensor in drawn.items()}
        plain = {"input_layernorm": 64, "post_attention_layernorm": 64, "self_attn.q_norm": 32, "self_attn.k_norm": 32}
        tensors |= {f"model.layers.{i}.{name}.weight": torch.ones(size) for name, size in plain.items()}
        tensors[f"model.layers.{i}.mlp.gate.weight"] = torch.randn(16, 64, generator=random).bfloat16()
    tensors |= {"model.embed_tokens.weight": torch.ones(64, 64), "lm_head.weight": torch.ones(64, 64)}
    tensors["model.norm.weight"] = torch.ones(64)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | {"quantization_config": config}))
    return folder


def held(value: object, found: dict[int, int]) -> dict[int, int]:
    """Bytes of the tensors that objects of Paceline hold, by their place in memory."""
    if isinstance(value, torch.Tensor):
        found[value.data_ptr()] = max(value.nbytes, found.get(value.data_ptr(), 0))
        return found
    inside: list[object] = list(value) if isinstance(value, (list, tuple)) else []
    if type(value).__module__.startswith("paceline") and hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    for each in inside:
        held(each, found)
    return found


def of_layers(plan: ModelPlan) -> int:
    return sum(part.num_bytes for part in plan.parts if part.name != "embedding and LM head")


def check_plan(folder: Path) -> None:
    plan = plan_model(folder, torch.bfloat16)
    model: Any = load_target(folder, torch.bfloat16, torch.device("cpu"))
    assert of_layers(plan) == sum(held([*model.layers, model.norm], {}).values())
    assert plan.refusals == ()


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_a_node_holds_what_is_planned(case: str, tmp_path: Path) -> None:
    """Mutants: scales always as float16, or never; blocks' scales as they lie; minimums that nobody has; floats beside
    codes counted apart."""
    write_quantised(tmp_path / "model", *CASES[case], 4 if case in quantised.OF_128 else 1)
    check_plan(tmp_path / "model")


@needs_kernels
@pytest.mark.parametrize("case", EXPERTS)
def test_a_node_holds_what_is_planned_of_experts(case: str, tmp_path: Path) -> None:
    """Mutants: routers in bf16; a dry run that goes by types and shapes alone."""
    check_plan(write_experts(tmp_path / "model", *(CASES | {"one layout": ONE_LAYOUT})[case]))


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_holds_what_is_planned(case: str, tmp_path: Path) -> None:
    """Mutants: codes of four bits as bytes, no minimums."""
    from paceline.layers.exact_products import Matrices

    write_quantised(tmp_path / "model", *CASES[case], 4 if case in quantised.OF_128 else 1)
    for name, weight in open_checkpoint(tmp_path / "model", torch.bfloat16).items():
        if not isinstance(weight, QuantizedWeight):
            continue
        if weight.float4:
            assert gpu_bytes(weight, torch.bfloat16) == 2 * weight.codes.numel()
            continue
        made = Matrices.of(weight)
        tensors = (made.values, made.scales, made.minimums)
        assert gpu_bytes(weight, torch.bfloat16) == sum(t.nbytes for t in tensors if t is not None), name


# ---- published shapes

Tensor = list[Any]  # name, shape, type: as an index lists it


def gptq_tensors(layer: str, rows: int, columns: int, size: int) -> list[Tensor]:
    groups = columns // size
    return [
        [f"{layer}.qweight", [columns // 8, rows], "I32"], [f"{layer}.qzeros", [groups, rows // 8], "I32"],
        [f"{layer}.scales", [groups, rows], "F16"], [f"{layer}.g_idx", [columns], "I32"],
        [f"{layer}.bias", [rows], "F16"],
    ]  # fmt: skip


def awq_tensors(layer: str, rows: int, columns: int, size: int) -> list[Tensor]:
    return [
        [f"{layer}.qweight", [columns, rows // 8], "I32"], [f"{layer}.qzeros", [columns // size, rows // 8], "I32"],
        [f"{layer}.scales", [columns // size, rows], "F16"],
    ]  # fmt: skip


def packed_tensors(layer: str, rows: int, columns: int, size: int) -> list[Tensor]:
    return [
        [f"{layer}.weight_packed", [rows, columns // 8], "I32"], [f"{layer}.weight_shape", [2], "I64"],
        [f"{layer}.weight_scale", [rows, columns // size], "BF16"],
    ]  # fmt: skip


def of_rows(kind: str, scale: str) -> Callable[[str, int, int, int], list[Tensor]]:
    return lambda layer, rows, columns, size: [
        [f"{layer}.weight", [rows, columns], kind],
        [f"{layer}.weight_scale", [rows, 1], scale],
    ]


def nvfp4_tensors(codes: str, number: str) -> Callable[[str, int, int, int], list[Tensor]]:
    return lambda layer, rows, columns, size: [
        [f"{layer}.{codes}", [rows, columns // 2], "U8"],
        [f"{layer}.weight_scale", [rows, columns // 16], "F8_E4M3"],
        [f"{layer}.{number}", [] if codes == "weight" else [1], "F32"],
        [f"{layer}.{'input_scale' if codes == 'weight' else 'input_global_scale'}", [1], "F32"],
    ]


OF_128 = {"group_size": 128}
ROWS_OF_FLOAT8 = quantised.FLOAT8 | {"strategy": "channel"}
# The section of config.json, the tensors of a layer, bits of a weight in groups, and bytes of an output feature.
INDEXED: dict[str, tuple[dict[str, Any], Callable[[str, int, int, int], list[Tensor]], float, int]] = {
    "gptq": (quantised.GPTQ | OF_128, gptq_tensors, 4 + 16 / 128, 0),
    "gptq, asymmetric": (quantised.GPTQ | OF_128 | {"sym": False}, gptq_tensors, 4 + 64 / 128, 0),
    "gptq, desc_act": (quantised.GPTQ | OF_128 | {"desc_act": True}, gptq_tensors, 16, 0),
    "awq": (quantised.AWQ | OF_128, awq_tensors, 4 + 64 / 128, 0),
    "w4a16": (compressed("pack-quantized", quantised.INT4 | OF_128), packed_tensors, 4 + 16 / 128, 0),
    "w8a8": (compressed("int-quantized", quantised.ROWS, quantised.TOKEN), of_rows("I8", "F32"), 8, 4),
    "float8": (compressed("float-quantized", ROWS_OF_FLOAT8), of_rows("F8_E4M3", "BF16"), 8, 2),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", quantised.NVFP4, quantised.FLOAT4_INPUTS),
        nvfp4_tensors("weight_packed", "weight_global_scale"),
        4.5,
        4,
    ),
    "modelopt": (quantised.MODELOPT, nvfp4_tensors("weight", "weight_scale_2"), 4.5, 4),
    "modelopt, float8": (quantised.MODELOPT | {"quant_algo": "FP8"}, of_rows("F8_E4M3", "F32"), 8, 4),
}


def write_index(file: Path, model: str, scheme: str, size: int = 128) -> tuple[int, int]:
    """An index of two layers of ``model``, whose linear layers are quantised; the elements of those, and the rows."""
    config, tensors_of, _, _ = INDEXED[scheme]
    raw = json.loads((INDEXES / f"{model}.json").read_text())
    last = raw["config"]["num_hidden_layers"] - 1
    raw["config"] |= {"num_hidden_layers": 2, "quantization_config": config}
    listed, elements, features = list[Tensor](), 0, 0
    for name, shape, kind in raw["tensors"]:
        name = name.replace(f"{{0-{last}}}", "{0-1}")
        if not name.endswith("_proj.weight"):
            listed.append([name, shape, kind])
            continue
        listed += tensors_of(name.removesuffix(".weight"), shape[0], shape[1], size)
        count = 2 * (raw["config"].get("num_experts", 1) if ".experts." in name else 1)
        elements, features = elements + count * shape[0] * shape[1], features + count * shape[0]
    file.write_text(json.dumps(raw | {"tensors": listed}))
    return elements, features


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("scheme", INDEXED)
def test_bits_of_a_weight(scheme: str, model: str, tmp_path: Path) -> None:
    """Mutants: ``sym`` and ``desc_act`` of GPTQ's config unread, and its biases of zeros left over."""
    elements, features = write_index(tmp_path / "index.json", model, scheme)
    plan = plan_model(tmp_path / "index.json", torch.bfloat16)
    parts = {part.name: part.num_bytes for part in plan.parts}
    layers = sum(parts.get(name, 0) for name in ("attention", "MLPs", "experts"))
    _, _, bits, more = INDEXED[scheme]
    assert layers == elements * bits / 8 + features * more
    plan.check_degree(8)


def test_ranks_that_part_groups(tmp_path: Path) -> None:
    """14,336 columns are 8 slabs of 3.5 groups of 512. Mutant: the groups are not looked at."""
    config = compressed("pack-quantized", quantised.INT4 | {"group_size": 512})
    write_index(tmp_path / "index.json", "llama-3.1-8b", "w4a16", 512)
    raw = json.loads((tmp_path / "index.json").read_text())
    raw["config"]["quantization_config"] = config
    (tmp_path / "index.json").write_text(json.dumps(raw))
    plan = plan_model(tmp_path / "index.json", torch.bfloat16)
    plan.check_degree(1)
    with pytest.raises(ConfigError, match=r"part groups of model\.layers\.0\.mlp\.down_proj\.weight"):
        plan.check_degree(2)


def test_an_unknown_bias_is_named(tmp_path: Path) -> None:
    """A checkpoint of floats has none that are zeros by rule. Mutant: its values are asked for."""
    raw = json.loads((INDEXES / "llama-3.1-8b.json").read_text())
    raw["tensors"].append(["model.layers.0.mlp.down_proj.bias", [4096], "BF16"])
    (tmp_path / "index.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.0\.mlp\.down_proj\.bias"):
        plan_model(tmp_path / "index.json", torch.bfloat16)
