"""Quantised Hugging Face folders against the numbers that they were made of, and what is refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.select import attention_for
from paceline.errors import ConfigError
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.digest import weights_digest
from paceline.models.loader import WeightBag
from paceline.models.quantization.fp4 import nvfp4_weight
from paceline.models.quantization.fusing import fuse_layers, reordered
from paceline.models.registry import load_target, open_checkpoint
from paceline.spec_decode.heads.mtp import load_mtp
from tests.support.needs import needs_kernels
from tests.support.quantised_files import (
    Draw,
    awq,
    compressed,
    floats,
    fp4,
    fp8,
    gptq,
    int8,
    packed,
    quantise_folder,
    write_floats,
    write_quantised,
)
from tests.support.tiny_deepseek import write_folder

CPU = torch.device("cpu")
TOKENS = [(17 * i + 3) % 211 for i in range(12)]
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
ORDERED = INT4 | {"actorder": "group"}
FLOAT8 = {"num_bits": 8, "type": "float"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
FLOAT4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
EVERY = {"targets": ["Linear"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 32], "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
LARGE = {"weight_block_size": [128, 128]}
MIXED = compressed("mixed-precision", INT4 | {"symmetric": False})
MIXED["config_groups"]["group_1"] = {"targets": ["re:.*self_attn.*"], "weights": ROWS, "input_activations": None}


def every(draw: Draw) -> Callable[[str], Draw]:
    return lambda name: draw


def but_down(draw: Draw) -> Callable[[str], Draw]:
    """The layer that a config leaves out is floats."""
    return lambda name: floats if "down" in name else draw


# Mutants: GPTQ's zero point one off (gptq asym), AWQ's order taken as it lies, the scales of blocks transposed (blocks
# of 24 x 32 over layers of 64 x 96), packed zero points read along the input features, the order of groups ignored.
def turned(*places: str) -> dict[str, Any]:
    """A rotation that is applied in ``places``."""
    applied = [{"targets": ["Linear"], "location": place, "inverse": False} for place in places]
    return {"transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": applied}}}}


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Draw]]] = {
    "fp8 blocks": (BLOCKS, every(fp8((24, 32), "weight_scale_inv"))),
    "fp8 rows": ({"quant_method": "fp8", "activation_scheme": "static"}, every(fp8(None, "weight_scale"))),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, every(fp8(None, "weight_scale"))),
    "fp8 tensor, of transformers": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        every(fp8(None, "weight_scale_inv", per_tensor=True)),
    ),
    "fp8 tensor": ({"quant_method": "fp8"}, every(fp8(None, "weight_scale", per_tensor=True))),
    "gptq 4 sym": (GPTQ, every(gptq(4, 32, sym=True))),
    "gptq 4 asym": (GPTQ | {"sym": False}, every(gptq(4, 32, sym=False))),
    "gptq 8 asym, one group": (
        GPTQ | {"bits": 8, "group_size": -1, "desc_act": True, "sym": False},
        every(gptq(8, 96, sym=False)),
    ),
    "gptq 4 desc_act": (GPTQ | {"desc_act": True, "sym": False}, every(gptq(4, 32, sym=False, act=True))),
    "gptq_v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        every(gptq(4, 32, sym=False, v2=True, order=False)),
    ),
    "gptq_v2, by its other name": (
        GPTQ | {"checkpoint_format": None, "format": "gptq_v2", "sym": False},
        every(gptq(4, 32, sym=False, v2=True)),
    ),
    "awq": (AWQ, but_down(awq(32))),
    "ct int8": (compressed("int-quantized", ROWS, TOKEN, ignore=["lm_head", "re:.*down_proj"]), but_down(int8())),
    "ct int8 asym": (compressed("int-quantized", ROWS | {"symmetric": False}), every(int8(zeros=True))),
    "ct int8 tensor": (compressed("naive-quantized", ROWS | {"strategy": "tensor"}), every(int8(per_tensor=True))),
    "ct w4a16": (compressed("pack-quantized", INT4), every(packed(4, 32, zeros=False))),
    "ct w4a16, turned": (
        compressed("pack-quantized", INT4) | turned("weight_input", "weight_output"),
        every(packed(4, 32, zeros=False)),
    ),
    "ct w4a16 asym": (compressed("pack-quantized", INT4 | {"symmetric": False}), every(packed(4, 32, zeros=True))),
    "ct w4a16 actorder": (compressed("pack-quantized", ORDERED), every(packed(4, 32, zeros=False, act=True))),
    "ct w8a16": (compressed("pack-quantized", ROWS), every(packed(8, -1, zeros=False))),
    "ct fp8": (compressed("float-quantized", FLOAT8 | {"strategy": "channel"}), every(fp8(None, "weight_scale"))),
    "ct fp8 blocks": (
        compressed("float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [24, 32]}),
        every(fp8((24, 32), "weight_scale")),
    ),
    "ct nvfp4": (compressed("nvfp4-pack-quantized", NVFP4, FLOAT4_INPUTS), every(fp4(16, has_global=True))),
    "ct mxfp4": (compressed("mxfp4-pack-quantized", MXFP4), every(fp4(32, has_global=False))),
    "modelopt": (MODELOPT, every(fp4(16, has_global=True, modelopt=True))),
    "modelopt mixed": (
        MODELOPT | {"quant_algo": "MIXED_PRECISION"},
        lambda n: fp4(16, has_global=True, modelopt=True) if "mlp" in n else fp8(None, "weight_scale", per_tensor=True),
    ),
    "ct mixed": (MIXED, lambda name: packed(8, -1, zeros=False) if "attn" in name else packed(4, 32, zeros=True)),
}
# The sizes that published checkpoints have.
OF_128: dict[str, tuple[dict[str, Any], Callable[[str], Draw]]] = {
    "fp8, blocks of 128": (BLOCKS | LARGE, every(fp8((128, 128), "weight_scale_inv"))),
    "gptq 4, groups of 128": (GPTQ | {"group_size": 128, "sym": False}, every(gptq(4, 128, sym=False))),
    "awq, groups of 128": (AWQ | {"group_size": 128}, every(awq(128))),
    "ct w4a16, groups of 128": (
        compressed("pack-quantized", INT4 | {"group_size": 128}),
        every(packed(4, 128, zeros=False)),
    ),
}


def logits(folder: Path) -> torch.Tensor:
    model = load_target(folder, torch.float32, CPU)
    spec, kv, allocator = model.spec, KvPool(KvLayout(model.kv_layers, model.dtype), 8, 8), PageAllocator(8)
    attention = attention_for(CPU, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return logits_in_chunks(model, kv, allocator, attention, TOKENS, (len(TOKENS),))


@pytest.mark.parametrize("case", CASES | OF_128)
def test_numbers_and_logits(case: str, tmp_path: Path) -> None:
    """Mutants: NVFP4's divisor as a factor and modelopt's factor as a divisor, the upper half of a byte first."""
    (config, draw), times = (CASES | OF_128)[case], 4 if case in OF_128 else 1
    layers = write_quantised(tmp_path / "quantised", config, draw, times)
    found = open_checkpoint(tmp_path / "quantised", torch.float32)
    rounded = False
    for name, layer in layers.items():
        weight = found[f"{name}.weight"]
        if layer.codes is None:
            assert isinstance(weight, torch.Tensor)
            assert torch.allclose(weight, layer.weight, rtol=1e-6, atol=1e-6), name
            continue
        assert isinstance(weight, QuantizedWeight)
        assert torch.equal(weight.codes.float(), layer.codes.float()), name
        assert torch.allclose(weight.dequantised(), layer.weight, rtol=1e-6, atol=1e-6), name
        rounded = rounded or weight.int8_activations
    assert rounded == (case == "ct int8")
    plain = write_floats(tmp_path / "floats", layers, times)
    mine, theirs = logits(tmp_path / "quantised"), logits(plain)
    error = ((mine - theirs).norm() / theirs.norm()).item()
    assert error < (0.05 if rounded else 1e-5)
    assert weights_digest(plain) != weights_digest(tmp_path / "quantised")


def change(folder: Path, changes: dict[str, Any]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(raw))


def test_what_the_config_says_is_part_of_the_weights(tmp_path: Path) -> None:
    write_quantised(tmp_path, *CASES["gptq 4 sym"])
    before = weights_digest(tmp_path)
    change(tmp_path, {"checkpoint_format": "gptq_v2"})  # the same bytes, another model
    assert weights_digest(tmp_path) != before


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gptq 4 sym", {"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
    ("gptq 4 sym", {"bits": 3}, "3 bits"),
    ("gptq 4 sym", {"bits": "4"}, "'4' is not a whole number"),
    ("gptq 4 sym", {"group_size": 0}, "group_size 0"),
    ("gptq 4 sym", {"checkpoint_format": "marlin"}, "'marlin'"),
    ("gptq 4 sym", {"dynamic": {"+:.*down": {"bits": 8}}}, "single layers"),
    ("gptq 4 sym", {"group_size": 64}, "scales has shape"),
    ("gptq 4 sym", {"checkpoint_format": ["gptq"]}, "config cannot be read"),
    ("awq", {"version": "gemv"}, "'gemv'"),
    ("awq", {"bits": 8}, "8 bits"),
    ("fp8 blocks", {"fmt": "e5m2"}, "'e5m2'"),
    ("fp8 blocks", {"weight_block_size": [128]}, "weight_block_size"),
    ("fp8 blocks", {"weight_block_size": [32, 24]}, "has shape"),
    ("fp8 blocks", {"weight_block_size": [32, 12]}, "groups of 12"),
    ("fp8 blocks", {"weight_block_size": None}, "neither one scale nor"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
    ("modelopt", {"group_size": 32}, "group_size 32"),
    ("ct int8", {"format": "marlin-24"}, "marlin-24"),
    ("ct nvfp4", {"config_groups": {"g": EVERY | {"weights": NVFP4 | {"group_size": 12}}}}, "groups of 12"),
    ("ct nvfp4", {"config_groups": {"g": EVERY | {"weights": MXFP4}}}, "weight_scale is F8_E4M3, expected U8"),
    ("ct int8", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
    ("ct int8", turned("weight_output", "input"), "transform R1 of 'input'"),
    ("ct int8", {"config_groups": {}}, "without config_groups"),
    ("ct int8", {"config_groups": {"g": {"targets": ["Linear"], "weights": ROWS | {"num_bits": 6}}}}, "of 6 bits"),
    ("ct int8", {"config_groups": {"g": {"targets": ["re:.*mlp.*"], "weights": ROWS}}}, "no group for it"),
    ("ct int8", {"config_groups": {"g": {"targets": ["re:(a+)+$"], "weights": ROWS}}}, "too long"),
    ("ct int8", {"config_groups": {"g": {"targets": ["re:("], "weights": ROWS}}}, "cannot be read"),
    ("ct int8", {"ignore": ["re:.*q_proj"]}, "q_proj is quantised, but the config ignores it"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "changes", "named"), REFUSED)
def test_refused_by_name(case: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, *CASES[case])
    change(tmp_path, changes)
    with pytest.raises(ConfigError, match=named):
        open_checkpoint(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("case", "name", "tensor", "named"),
    [
        ("gptq 4 sym", "q_proj.g_idx", torch.arange(64).int() // 16, "g_idx names groups that are not there: 2"),
        ("ct w4a16 actorder", "q_proj.weight_g_idx", torch.full((64,), -1), "g_idx names groups that are not there"),
        ("gptq 4 sym", "q_proj.qzeros", torch.zeros(2, 7, dtype=torch.int32), "qzeros has shape"),
        ("ct w4a16", "q_proj.weight_shape", torch.tensor([64, 1 << 40]), "weight_shape says"),
        ("fp8 blocks", "q_proj.weight", torch.ones(64, 64, dtype=torch.bfloat16), "is BF16, expected F8_E4M3"),
        ("modelopt", "q_proj.weight_scale_2", torch.zeros(()), "is not one positive number"),
        ("ct nvfp4", "q_proj.weight_global_scale", torch.zeros(1), "is not one positive number"),
        ("ct mxfp4", "q_proj.weight_scale", torch.ones(64, 4, dtype=torch.uint8), "weight_scale has shape"),
        ("awq", "down_proj.weight", torch.ones(64, 96, dtype=torch.int8), "no scales"),
    ],
)
def test_damaged_layers(case: str, name: str, tensor: torch.Tensor, named: str, tmp_path: Path) -> None:
    write_quantised(tmp_path, *CASES[case])
    stored = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    place = next(n for n in stored if n.endswith(name))
    save_file(stored | {place: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=named):
        open_checkpoint(tmp_path, torch.float32)


@pytest.mark.parametrize(("scale", "number", "has_tables"), [
    (0.5, 0.01, True), (-0.5, 0.01, False), (-0.0, 0.01, False),
    (float("nan"), 0.01, False), (0.5, 1e-36, False),
])  # fmt: skip
def test_nvfp4_scales_that_no_kernel_makes(scale: float, number: float, has_tables: bool) -> None:
    """They stay float32. Mutant: they lie as float8 whatever they are."""
    scales = torch.full((32, 2), scale).to(torch.float8_e4m3fn)
    weight = nvfp4_weight(torch.zeros(32, 16, dtype=torch.uint8), scales, torch.tensor(number), 16, divides=False)
    assert (weight.tables is not None) == has_tables
    expected = scales.float() * number
    assert torch.equal(weight.scales.nan_to_num(), expected.nan_to_num())


def test_layers_that_are_multiplied_together(tmp_path: Path) -> None:
    """Unlike widths and groups change no value; floats beside codes make floats; unlike inputs are refused."""
    random = torch.Generator().manual_seed(1)
    parts = {}
    for name, kind, size in (("q", packed(4, 32, zeros=True), 64), ("k", packed(8, 16, zeros=False), 32)):
        bits = 4 if name == "q" else 8
        drawn = kind(size, 64, random)
        scale = torch.ones(size, 64 // (32 if name == "q" else 16))
        parts[name] = QuantizedWeight(drawn.codes.to(torch.int8), scale, None, bits, 32 if name == "q" else 16, False)  # type: ignore[union-attr]
    fused = fuse_layers(parts)
    assert isinstance(fused, QuantizedWeight)
    assert (fused.bits, fused.group_size) == (8, 16)
    assert torch.equal(fused.dequantised(), torch.cat([part.dequantised() for part in parts.values()]))
    order = torch.randperm(96, generator=random)
    moved = reordered(fused, order)
    assert isinstance(moved, QuantizedWeight)
    assert torch.equal(moved.dequantised(), fused.dequantised()[order])
    beside = fuse_layers({"q": parts["q"], "k": torch.ones(8, 64, dtype=torch.bfloat16)})
    assert isinstance(beside, torch.Tensor)
    assert beside.dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="q, k are multiplied together"):
        fuse_layers(parts | {"k": QuantizedWeight(parts["k"].codes, parts["k"].scales, None, 8, 16, True)})


def test_scales_of_a_kv_cache_are_not_read(tmp_path: Path) -> None:
    """As AutoFP8 names them, and others; nor those of activations."""
    config, draw = CASES["fp8 tensor"]
    layers = write_quantised(tmp_path, config, draw)
    (file,) = tmp_path.glob("*.safetensors")
    scales = [f"self_attn.{name}" for name in ("kv_scale", "k_proj.k_scale", "v_proj.v_scale")]
    scales += [f"mlp.up_proj.{name}" for name in ("activation_scale", "input_scale")]
    save_file(load_file(file) | {f"model.layers.0.{name}": torch.ones(1) for name in scales}, file)
    found = open_checkpoint(tmp_path, torch.float32)
    assert set(layers) <= {name.removesuffix(".weight") for name in found}
    assert not [name for name in found if name.endswith("scale")]


@needs_kernels
def test_deepseek_with_its_mtp_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention, experts and modules in fp8 blocks give what the floats that they mean give; rope rows are put
    in order as codes are, and kv_b_proj is folded as floats. The modules are taken as they are stored; they draft in
    test_exactness_checkpoints. Mutant: a module's layers become floats when they are taken."""
    drawn, chosen = fp8((24, 32), "weight_scale_inv"), re.compile(r"(?<!eh)_proj(_with_mqa)?$")
    for name in ("quantised", "floats"):
        folder = write_folder(tmp_path / name)
        quantise_folder(folder, BLOCKS, lambda n: drawn if chosen.search(n) else None, meant=name == "floats")
    mine, theirs = logits(tmp_path / "quantised"), logits(tmp_path / "floats")
    assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-4
    model = load_target(tmp_path / "quantised", torch.float32, CPU)
    taken, take_linear = {}, WeightBag.take_linear

    def noted(bag: WeightBag, name: str, shape: tuple[int, int] | None = None) -> LinearWeight:
        taken[name] = take_linear(bag, name, shape)
        return taken[name]

    monkeypatch.setattr(WeightBag, "take_linear", noted)
    modules, digest = load_mtp(str(tmp_path / "quantised"), model, 2, model.rope_table())
    assert len(modules) == 2
    assert len(taken) > 2 * 8 * 3  # of the experts alone
    plain = [name for name, weight in taken.items() if isinstance(weight, torch.Tensor)]
    assert plain == [f"model.layers.{i}.eh_proj.weight" for i in (3, 4)]
    assert digest == weights_digest(tmp_path / "quantised")
