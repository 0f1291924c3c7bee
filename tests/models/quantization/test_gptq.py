"""GPTQ: codes against the least-squares problem that they solve step by step, and inputs against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.assembly.calibrate import calibrated
from paceline.models.compensated import DAMPING, compensated
from paceline.models.write_quantised import TOP, FourBits, four_bit_rows

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
SEQUENCES = [[(7 * i + 13 * j) % 97 for i in range(40)] for j in range(6)]
PRODUCTS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def hessian_of(inputs: torch.Tensor) -> torch.Tensor:
    wide = inputs.double()
    return wide.t() @ wide


@pytest.mark.parametrize("size", [32, 64])
def test_features_left_are_the_best_ones_for_those_that_have_codes(size: int) -> None:
    """After each feature, those that have no codes yet must minimise the error of the products: a system that is
    solved here anew each time, in float64. Mutant: groups of 32 whatever is asked."""
    random = torch.Generator().manual_seed(5)
    mixed = torch.randn(80, 80, generator=random) * 0.3
    hessian = hessian_of(torch.randn(400, 80, generator=random) @ (torch.eye(80) + mixed))
    weight = torch.randn(6, 80, generator=random)
    found = compensated(weight, hessian, size)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(80)
    wanted, written = weight.double(), found.dequantised().double()
    for j in range(80):
        left = wanted[:, j:]
        if j:
            share = torch.linalg.solve(damped[j:, j:], damped[j:, :j])
            left = left + (wanted[:, :j] - written[:, :j]) @ share.t()
        group = j // size
        if j % size == 0:
            scales = four_bit_rows(left[:, :size].float(), size).scales
            assert torch.allclose(found.scales[:, group].float(), scales[:, 0].float(), rtol=2e-3), j
        place = left[:, 0] / found.scales[:, group].double() + found.zeros[:, group]
        assert ((place.clamp(0, TOP) - found.codes[:, j]).abs() <= 0.501).all(), j


def test_features_that_were_never_seen_are_zero() -> None:
    random = torch.Generator().manual_seed(6)
    inputs = torch.randn(50, 64, generator=random)
    inputs[:, 7] = 0.0
    written = compensated(torch.randn(4, 64, generator=random), hessian_of(inputs)).dequantised()
    assert torch.equal(written[:, 7], torch.zeros(4))
    assert torch.isfinite(written).all()


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_layers_are_calibrated_on_what_they_see(tmp_path: Path) -> None:
    """transformers says what each product's inputs are, where the blocks before it are rounded."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval().bfloat16()
    model.save_pretrained(tmp_path)
    found = calibrated(tmp_path, SEQUENCES, lambda what, share: None)
    assert len(found) == 14
    for i in range(2):
        for product in PRODUCTS:
            name = f"model.layers.{i}.{product}"
            layer = model.get_submodule(name)
            best = compensated(layer.weight.float(), hessian_of(_inputs(model, layer)))
            assert _alike(best, found[f"{name}.weight"]) > 0.95, name
        for name, codes in found.items():
            if name.startswith(f"model.layers.{i}."):
                model.get_parameter(name).data = codes.dequantised().bfloat16()


def _inputs(model: Any, layer: torch.nn.Module) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float().flatten(0, -2)))
    with torch.inference_mode():
        for ids in SEQUENCES:
            model(torch.tensor([ids]))
    hook.remove()
    return torch.cat(seen)


def _alike(one: FourBits, other: FourBits) -> float:
    return (one.codes == other.codes).float().mean().item()
