"""Ropes as configs of released checkpoints write them, against transformers on tiny random models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.config import ModelSpec
from tests.support.parity import TOKENS, VOCAB, worst_difference, write_reference

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "sliding_window": None,
}
THETA = 5000.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def change(folder: Path, **changes: Any) -> None:
    """Other values in config.json; None leaves a key out."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_yarn(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a plain rope; one that is stretched and not sharpened."""
    expected = write_reference(tmp_path, family, SHAPE | {"rope_parameters": YARN | {"rope_theta": THETA}})
    assert worst_difference(tmp_path, expected) < 1e-4
    good = ModelSpec.from_folder(tmp_path)
    assert good.rope_scaling is not None
    for scaling in (None, good.rope_scaling | {"attention_factor": 1.0}):
        mutant = replace(good, rope_scaling=scaling)
        monkeypatch.setattr(ModelSpec, "from_folder", lambda folder, mutant=mutant: mutant)
        assert worst_difference(tmp_path, expected) > 1e-2


def test_a_scaling_beside_parameters(tmp_path: Path) -> None:
    """Somebody follows Qwen's advice in a folder that transformers 5 wrote. Mutant: the parameters count alone."""
    from transformers import Qwen3ForCausalLM

    plain = {"rope_type": "default", "rope_theta": THETA}
    before = write_reference(tmp_path, "Qwen3", SHAPE | {"rope_parameters": plain})
    change(tmp_path, rope_scaling=YARN, rope_theta=THETA)
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKENS])).logits[0]
    assert (expected - before).abs().max() > 1e-2
    assert worst_difference(tmp_path, expected) < 1e-4
    change(tmp_path, rope_theta=None)  # the base stays that of the parameters
    assert ModelSpec.from_folder(tmp_path).rope_theta == THETA


def test_attn_factor(tmp_path: Path) -> None:
    """What DeepSeek-R1-0528-Qwen3-8B has: a factor beside YaRN's own, which it takes back. Mutant: it is not read."""
    attn_factor = 0.8782488562869419
    whole = attn_factor * (0.1 * math.log(4.0) + 1.0)
    rope = YARN | {"rope_theta": THETA}
    expected = write_reference(tmp_path, "Qwen3", SHAPE | {"rope_parameters": rope | {"attention_factor": whole}})
    change(tmp_path, rope_parameters=None, rope_scaling=YARN | {"attn_factor": attn_factor}, rope_theta=THETA)
    assert worst_difference(tmp_path, expected) < 1e-4
