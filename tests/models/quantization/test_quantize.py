"""``paceline quantize``: a folder of floats becomes a smaller one that loads, generates, and carries a card."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from cluster.commands.cli import app
from paceline.assembly.build import build_runner
from paceline.assembly.quantise import Job, quantise
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.models.registry import open_checkpoint
from paceline.request import SamplingParams, SequenceRequest
from tests.support.quantised_files import floats, write_floats, write_quantised


@pytest.fixture
def source(tmp_path: Path) -> Path:
    layers = write_quantised(tmp_path / "scratch", {"quant_method": "none"}, lambda name: floats)
    return write_floats(tmp_path / "floats", layers)


# Largest error in steps of a code: half of one, and for 4 bits what rounding the zero point adds.
@pytest.mark.parametrize(("scheme", "bits", "steps"), [("w8a8", 8, 0.51), ("w4a16", 4, 1.01)])
def test_a_folder_that_loads(scheme: str, bits: int, steps: float, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(source), "--scheme", scheme, "--output", str(output)])
    assert done.exit_code == 0, done.output
    card = (output / "README.md").read_text()
    assert f"--scheme {scheme} --output {output}" in card
    assert "perplexity on" in card
    assert "nats a token" in card
    plain, found = load_file(source / "model.safetensors"), open_checkpoint(output, torch.float32)
    assert set(found) == set(plain)
    for name, weight in plain.items():
        rounded = found[name]
        if "_proj" not in name:
            assert isinstance(rounded, torch.Tensor)
            assert torch.equal(rounded, weight), name
            continue
        assert isinstance(rounded, QuantizedWeight)
        assert (rounded.bits, rounded.int8_activations) == (bits, scheme == "w8a8")
        columns = torch.arange(weight.shape[1]) // rounded.group_size
        assert bool(((rounded.dequantised() - weight).abs() <= steps * rounded.scales[:, columns]).all()), name
    engine = ColocatedEngine(build_runner(NodeConfig(model=str(output), drafter="ngram", max_model_len=128)))
    request = SequenceRequest("r", tuple(b"a mill on a stream"), SamplingParams(temperature=0.0, seed=0, max_tokens=8))
    assert len(engine.generate([request])[0].token_ids) == 8
    config = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["ignore"]) == ("compressed-tensors", ["lm_head"])
    again = CliRunner().invoke(app, ["quantize", str(output), "--scheme", scheme, "--output", str(tmp_path / "b")])
    assert isinstance(again.exception, ConfigError)
    assert "quantised already" in str(again.exception)
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
