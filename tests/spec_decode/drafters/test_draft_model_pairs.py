"""Which draft models fit a target, and how their folders are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerOwner
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.spec_decode.drafters.draft_model import DraftModelDrafter
from paceline.spec_decode.heads.draft_model import load_draft_model
from tests.support.draft_model_drafting import (
    LAYERS,
    Shaped,
    build_draft,
    full_rounds,
    make,
)
from tests.support.tiny_model import tiny_spec, tiny_weights


def test_models_that_do_not_fit_are_refused_by_name() -> None:
    runner = make()
    target, kv, attention = runner.model, runner.kv, runner.attention

    def pair(draft: LlamaModel, first_layer: int = LAYERS, **options: Any) -> DraftModelDrafter:
        return DraftModelDrafter(target, draft, kv, attention, first_layer, 4, **options)

    with pytest.raises(ConfigError, match=r"vocab_size 1400 \(target 199\)"):
        pair(build_draft(runner.dtype, vocab_size=1400))
    with pytest.raises(ConfigError, match=r"bos_token_id 7 \(target 1\), eos_token_ids \(3, 4\)"):
        pair(build_draft(runner.dtype, bos_token_id=7, eos_token_ids=(3, 4)))
    with pytest.raises(ConfigError, match=r"dtype torch\.float32"):
        pair(build_draft(torch.float32))
    with pytest.raises(ConfigError, match="layers from 1 on"):
        pair(build_draft(runner.dtype), first_layer=1)
    with pytest.raises(ConfigError, match="layers from 2 on"):
        pair(build_draft(runner.dtype, num_layers=3))
    with pytest.raises(ConfigError, match="tree_width"):
        pair(build_draft(runner.dtype), static_tree=[(rank,) for rank in range(5)])
    assert pair(build_draft(runner.dtype, bos_token_id=None, eos_token_ids=())).kv_layers == kv.layout.layers[LAYERS:]


def folder_of(path: Path, spec: ModelSpec) -> Path:
    save_file(dict(tiny_weights(spec, torch.float32)._tensors), path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_hidden_layers": spec.num_layers,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "rope_theta")
    config |= {name: getattr(spec, name) for name in (*same, "max_position_embeddings", "bos_token_id")}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_is_loaded_onto_the_draft_layers(tmp_path: Path) -> None:
    runner = make()
    folder = folder_of(tmp_path, tiny_spec())
    model, digest = load_draft_model(str(folder), runner.model, LAYERS)
    assert len(digest) == 32
    assert [layer.kv_layer for layer in model.layers] == [LAYERS, LAYERS + 1]
    assert {layer.owner for layer in model.kv_layers} == {LayerOwner.DRAFT}
    assert model.dtype == runner.dtype
    drafter = Shaped(runner.model, model, runner.kv, runner.attention, LAYERS, 4)
    runner.drafter = drafter
    assert full_rounds(runner, 0.0) == {3}


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="drafter_path"):
        load_draft_model("", make().model, LAYERS)
