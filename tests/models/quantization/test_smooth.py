"""Smoothing: the model of floats keeps its bits, and rounded products come nearer to it where inputs have outliers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.assembly.calibrate import PARTS, calibrated, smoothed
from paceline.models.quantization.round_to_nearest import round_to_nearest
from paceline.models.smoothed import Factors, Inputs, best_factors, kept
from paceline.models.write_quantised import as_written, write_quantised
from tests.models.test_llama_parity import CASES, SHAPE, TOKENS, ours

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
SEQUENCES = [TOKENS, TOKENS[::-1]]
OUTLIERS = {3: 60.0, 17: 30.0, 40: 0.02}  # a feature of the hidden rows, and how much larger it is than others


def write_model(folder: Path, case: str) -> None:
    """Norms and up-projections leave a few features much larger than others; what reads them is as much smaller."""
    import transformers

    family, changes = CASES[case]
    torch.manual_seed(5)
    made = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**(SHAPE | changes)))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.3)
            for feature, size in OUTLIERS.items():
                if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
                    parameter[feature] *= size
                elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
                    parameter[:, feature] /= size
                elif name.endswith("mlp.up_proj.weight"):
                    parameter[:, feature] /= size
                    parameter[feature] *= size
    made.bfloat16().save_pretrained(folder)


def write_scaled(source: Path, folder: Path, factors: Mapping[str, Factors]) -> None:
    """The floats of ``source`` with factors."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    made = {name: factors[name](tensor) if name in factors else tensor for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize("case", ["llama", "llama, biases", "qwen3", "llama, as many KV heads"])
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16"])
def test_the_model_of_floats_keeps_its_bits(case: str, scheme: str, tmp_path: Path) -> None:
    """Mutants: a bias left as it is, a norm multiplied, factors of o_proj by the number of another head."""
    write_model(tmp_path / "floats", case)
    factors = smoothed(tmp_path / "floats", SEQUENCES, scheme, lambda what, share: None)
    write_scaled(tmp_path / "floats", tmp_path / "scaled", factors)
    before, after = (ours(tmp_path / name, TOKENS, (45,), torch.bfloat16) for name in ("floats", "scaled"))
    assert torch.equal(before, after)
    for product in () if scheme == "w4a16" else ("qkv_proj", "gate_up_proj", "o_proj", "down_proj"):
        read = [factors[f"model.layers.{i}.{PARTS[product][0]}.weight"].columns for i in range(3)]
        assert any(bool((columns != 1).any()) for columns in read if columns is not None), product


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.6), ("w4a8", 0.8), ("w4a16", 0.8)])
def test_rounding_costs_less(scheme: str, most: float, tmp_path: Path) -> None:
    """most: of what it costs without."""
    write_model(tmp_path / "floats", "llama")
    factors = smoothed(tmp_path / "floats", SEQUENCES, scheme, lambda what, share: None)
    for name, given in (("nearest", {}), ("smooth", factors)):
        (tmp_path / name).mkdir()
        write_quantised(tmp_path / "floats", tmp_path / name, scheme, lambda what, share: None, factors=given)
    floats, nearest, smooth = (ours(tmp_path / name, TOKENS, (45,)) for name in ("floats", "nearest", "smooth"))
    assert (smooth - floats).norm() < most * (nearest - floats).norm()


def test_factors_are_tried_in_the_groups_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: weights, or inputs, in groups of 32 whatever is asked."""
    write_model(tmp_path, "llama")
    tried = []

    def noted(inputs: Inputs, weight: torch.Tensor, rounded: Any, group: int, heads: Any = None) -> torch.Tensor:
        tried.append((group, torch.equal(rounded(weight), as_written(weight, "w4a8", 64)), weight.shape[1]))
        return best_factors(inputs, weight, rounded, group, heads)

    monkeypatch.setattr("paceline.assembly.calibrate.best_factors", noted)
    smoothed(tmp_path, SEQUENCES, "w4a8", lambda what, share: None, 64)
    assert tried
    assert all((group, same) == (min(64, width), True) for group, same, width in tried)


def test_gptq_of_a_smoothed_model(tmp_path: Path) -> None:
    """Its codes are those of a checkpoint that was written with the factors. Mutants: the sums of products as they are;
    weights of rounded blocks that keep the factors."""
    write_model(tmp_path / "floats", "llama")
    factors = smoothed(tmp_path / "floats", SEQUENCES, "w4a16", lambda what, share: None)
    write_scaled(tmp_path / "floats", tmp_path / "scaled", factors)
    found = calibrated(tmp_path / "floats", SEQUENCES, lambda what, share: None, factors)
    expected = calibrated(tmp_path / "scaled", SEQUENCES, lambda what, share: None)
    assert found.keys() == expected.keys()
    assert all(torch.equal(codes.codes, expected[name].codes) for name, codes in found.items())


def test_factors_are_ones_where_nothing_is_gained() -> None:
    """Inputs are codes already: every factor would cost something. Mutant: the nearest products are not looked for."""
    inputs = torch.randint(-127, 128, (40, 64)).float()
    inputs[:, ::2] = inputs[:, ::2].clamp(-1, 1)
    inputs[:, 1] = 127.0
    weight = torch.randint(-1, 2, (9, 64)).float()
    found = best_factors(Inputs(inputs.abs().amax(dim=0), inputs), weight, lambda weight: weight, 64)
    assert torch.equal(found, torch.ones(64))


def test_query_heads_of_a_kv_head_have_its_factors() -> None:
    """The largest range counts. Mutant: that of the first of them."""
    inputs, weight = torch.randn(40, 128), torch.randn(9, 128)
    inputs[:, 32 + 5] = 1000.0  # the second of two query heads of 32, of the first of two KV heads
    found = best_factors(
        Inputs(inputs.abs().amax(dim=0), inputs),
        weight,
        lambda w: round_to_nearest(w, "w8a8").dequantised(),
        64,
        (2, 32),
    ).view(2, 2, 32)
    assert torch.equal(found[:, 0], found[:, 1])
    assert found[0, 0, 5] > 4 * found[0, 0].median()
    assert found[1, 0, 5] < 4 * found[1, 0].median()


def test_a_feature_that_was_never_seen() -> None:
    inputs, weight = torch.randn(40, 64), torch.randn(9, 64)
    inputs[:, 5], inputs[:, 9], weight[:, 7] = 0.0, 1000.0, 0.0
    found = best_factors(
        Inputs(inputs.abs().amax(dim=0), inputs), weight, lambda w: round_to_nearest(w, "w8a8").dequantised(), 64
    )
    assert found[[5, 7]].tolist() == [1.0, 1.0]
    assert found[9] > 1
    assert torch.isfinite(found).all()


def test_bits_that_float16_would_lose_are_kept() -> None:
    maker = torch.tensor([1.0, 2.0**-14 * 1.5, 1.0]).half()
    assert kept(torch.tensor([4.0, 4096.0, 2.0]), [maker]).tolist() == [4.0, 1.0, 2.0]
