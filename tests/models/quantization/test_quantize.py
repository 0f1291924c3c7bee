"""``paceline quantize``: a folder of floats becomes a smaller one that loads, generates, and carries a card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cluster.commands.cli import app
from paceline.assembly.quantise import Job, quantise
from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.models.registry import load_target, open_checkpoint
from paceline.models.write_quantised import as_written, write_quantised
from tests.support import quantised_files
from tests.support.tiny_deepseek import write_folder

PAGE = Path(__file__).parents[3] / "docs/guides/quantised.md"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    none = {"quant_method": "none"}
    layers = quantised_files.write_quantised(tmp_path / "scratch", none, lambda name: quantised_files.floats, 2)
    return quantised_files.write_floats(tmp_path / "floats", layers, 2)


# most: relative error of normal weights; in groups of 32 elements of 4 bits it is 0.079.
@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.01), ("w4a8", 0.083), ("w8a16", 0.01), ("w4a16", 0.083)])
def test_a_folder_that_loads(scheme: str, most: float, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    written = write_quantised(source, output, scheme, lambda what, share: None)
    assert written.layers == 7
    plain, found = load_file(source / "model.safetensors"), open_checkpoint(output, torch.float32)
    assert set(found) == set(plain)
    for name, weight in plain.items():
        rounded = found[name]
        if "_proj" not in name:
            assert isinstance(rounded, torch.Tensor)
            assert torch.equal(rounded, weight), name
            continue
        assert isinstance(rounded, QuantizedWeight)
        assert (rounded.bits, rounded.int8_activations) == (int(scheme[1]), scheme.endswith("a8"))
        assert ((rounded.dequantised() - weight).norm() / weight.norm()).item() < most, name
    load_target(output, torch.float32, torch.device("cpu"))
    raw = json.loads((output / "config.json").read_text())
    assert raw["_name_or_path"] == source.name  # by which the model's draft heads are found
    config = raw["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    with pytest.raises(ConfigError, match="quantised already"):
        write_quantised(output, tmp_path, scheme, lambda what, share: None)


SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range, that its codes span


def read_plainly(stored: dict[str, torch.Tensor], layer: str, size: int) -> tuple[torch.Tensor, ...]:
    """Codes from 0, and their scales and zero points, [rows, columns] each, out of compressed-tensors' words."""
    words, zeros = stored[f"{layer}.weight_packed"].tolist(), stored[f"{layer}.weight_zero_point"].tolist()
    rows, columns = stored[f"{layer}.weight_shape"].tolist()
    codes = [[words[n][k // 8] >> 4 * (k % 8) & 15 for k in range(columns)] for n in range(rows)]
    points = [[zeros[n // 8][k // size] >> 4 * (n % 8) & 15 for k in range(columns)] for n in range(rows)]
    scales = [[row[k // size] for k in range(columns)] for row in stored[f"{layer}.weight_scale"].tolist()]
    return torch.tensor(codes), torch.tensor(scales), torch.tensor(points)


@pytest.mark.parametrize(("scheme", "size"), [("w4a8", 64), ("w4a16", 128)])
def test_groups_of_a_size(scheme: str, size: int, tmp_path: Path) -> None:
    """Codes are the nearest ones of scales of ``size`` weights, for our loader and for a plain one. Mutants: groups of
    32 whatever is asked, in the codes or in the config."""
    draw = quantised_files.floats
    layers = quantised_files.write_quantised(tmp_path / "scratch", {"quant_method": "none"}, lambda name: draw, 4)
    output = tmp_path / "out"
    output.mkdir()
    source = quantised_files.write_floats(tmp_path / "floats", layers, 4)
    write_quantised(source, output, scheme, lambda what, share: None, group_size=size)
    stored, found = load_file(output / "model-00001.safetensors"), open_checkpoint(output, torch.float32)
    for name, layer in layers.items():
        codes, scales, zeros = read_plainly(stored, name, size)
        nearest = ((layer.weight / scales).round() + zeros).clamp(0, 15)
        assert torch.equal(codes.float(), nearest), name
        groups = layer.weight.view(len(codes), -1, size)
        ranges = groups.amax(dim=2).clamp(min=0) - groups.amin(dim=2).clamp(max=0)
        spans = 15 * scales[:, ::size] / ranges
        assert float((spans.unsqueeze(2) - torch.tensor(SHARES)).abs().amin(dim=2).max()) < 1e-3, name
        weight = found[f"{name}.weight"]
        assert isinstance(weight, QuantizedWeight)
        assert (weight.group_size, weight.int8_activations) == (size, scheme == "w4a8")
        assert torch.equal(weight.dequantised(), scales * (codes - 8) + scales * (8 - zeros)), name
    load_target(output, torch.float32, torch.device("cpu"))


# the range of a perplexity: random weights lose more to 4 bits than a model's
@pytest.mark.parametrize(("options", "how", "apart"), [
    ("--scheme w8a8", "rounded to the nearest code", 0.1),
    ("--scheme w8a8 --method smooth", "smoothed and rounded to the nearest code, calibrated on at most 1,024", 0.1),
    ("--scheme w4a16 --method gptq", "GPTQ, calibrated on at most 1,024 tokens of text that it wrote itself", 0.5),
    (f"--scheme w4a8 --group-size 64 --method smooth-gptq --calibration {PAGE}", "tokens of quantised.md", 0.5),
], ids=["nearest", "smooth", "its own text", "a text"])  # fmt: skip
def test_the_command_measures_both_models_and_writes_a_card(
    options: str, how: str, apart: float, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("calibrate", "quantise"):
        monkeypatch.setattr(f"paceline.assembly.{module}.SEQUENCES", 4)
    size, tried = 64 if "64" in options else 32, set()

    def noted(weight: torch.Tensor, scheme: str, group_size: int) -> torch.Tensor:
        tried.add(group_size)
        return as_written(weight, scheme, group_size)

    monkeypatch.setattr("paceline.assembly.calibrate.as_written", noted)
    output = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(source), "--output", str(output), *options.split()])
    assert done.exit_code == 0, done.output
    card = (output / "README.md").read_text()
    assert how in card
    scheme, _, more = options.partition(" --method")
    assert f"{scheme} --output {output}{more and f' --method{more}'}" in card
    if "gptq" in more:  # what it found is in the file
        weight = open_checkpoint(output, torch.float32)["model.layers.0.mlp.down_proj.weight"]
        nearest = tmp_path / "nearest"
        nearest.mkdir()
        write_quantised(source, nearest, "w4a16", lambda what, share: None)
        other = open_checkpoint(nearest, torch.float32)["model.layers.0.mlp.down_proj.weight"]
        assert isinstance(weight, QuantizedWeight)
        assert isinstance(other, QuantizedWeight)
        assert not torch.equal(weight.codes, other.codes)
        assert weight.group_size == size
        shutil.rmtree(nearest)
    assert tried == ({size} if "smooth" in options else set())
    found = re.search(r"perplexity on (\d+) held tokens.*\| ([\d.]+) \| ([\d.]+) \(", card)
    assert found is not None
    assert float(found[3]) == pytest.approx(float(found[2]), rel=apart)
    assert 0.0 <= float(re.findall(r"held text: ([\d.]+) nats", card)[0]) < apart
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "out", "scratch"]  # nothing half-made


def test_refused_by_name(source: Path, tmp_path: Path) -> None:
    def refusal(**changes: object) -> str:
        options = {"model": str(source), "scheme": "w8a8", "output": tmp_path / "out"} | changes
        with pytest.raises(ConfigError) as raised:
            quantise(Job(**options), lambda what, share: None)  # type: ignore[arg-type]
        return str(raised.value)

    assert "'w2a16' is not one of w8a8" in refusal(scheme="w2a16")
    assert "exists already" in refusal(output=source)
    assert "cannot be read" in refusal(text=tmp_path / "none.txt")
    gptq = {"scheme": "w4a8", "method": "gptq"}
    assert "16 is not one of 32, 64, 128" in refusal(group_size=16)
    assert "w8a8 has a scale for each output feature" in refusal(group_size=64)
    columns = "groups of 128 do not divide the 192 columns of model.layers.0.mlp.down_proj.weight"
    assert columns in refusal(scheme="w4a16", group_size=128)
    assert "makes codes of 4 bits" in refusal(method="gptq")
    assert "method nearest does not calibrate" in refusal(calibration=PAGE)
    assert "cannot be the one that calibrates" in refusal(**gptq, calibration=PAGE, text=PAGE)
    short = tmp_path / "short.txt"
    short.write_text("Too few words.")
    assert "fewer than 256" in refusal(**gptq, calibration=short)
    assert "of the Llama family, not those of deepseek" in refusal(**gptq, model=str(write_folder(tmp_path / "mla")))
    assert not (tmp_path / "out").exists()
