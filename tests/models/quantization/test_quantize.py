"""``paceline quantize``: a folder of floats becomes a smaller one that loads, generates, and carries a card."""

from __future__ import annotations

import json
import re
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
from paceline.models.write_quantised import write_quantised
from tests.support import quantised_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    none = {"quant_method": "none"}
    layers = quantised_files.write_quantised(tmp_path / "scratch", none, lambda name: quantised_files.floats)
    return quantised_files.write_floats(tmp_path / "floats", layers)


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
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    with pytest.raises(ConfigError, match="quantised already"):
        write_quantised(output, tmp_path, scheme, lambda what, share: None)


def test_the_command_measures_both_models_and_writes_a_card(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(source), "--scheme", "w8a8", "--output", str(output)])
    assert done.exit_code == 0, done.output
    card = (output / "README.md").read_text()
    assert f"--scheme w8a8 --output {output}" in card
    found = re.search(r"perplexity on (\d+) held tokens.*\| ([\d.]+) \| ([\d.]+) \(", card)
    assert found is not None
    assert float(found[3]) == pytest.approx(float(found[2]), rel=0.1)
    assert 0.0 <= float(re.findall(r"held text: ([\d.]+) nats", card)[0]) < 0.1
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
