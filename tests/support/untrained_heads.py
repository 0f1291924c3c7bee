"""Untrained heads of every kind for the tiny model, and the model itself, in their public formats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.models.config import ModelSpec
from paceline.models.llama_shapes import model_shapes
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, MedusaConfig, MtpConfig
from paceline.spec_decode.heads.formats.eagle import vocabulary_tensors
from paceline.spec_decode.heads.formats.layer import LayerShape, Shapes
from paceline.spec_decode.heads.formats.mtp import mtp_shapes
from paceline.spec_decode.heads.formats.write import write_eagle1, write_eagle3, write_medusa, write_mtp
from tests.support.tiny_model import tiny_spec, tiny_weights

DRAFT_VOCAB = 120


def write_tiny_head(folder: Path, name: str, spec: ModelSpec | None = None) -> None:
    """``name``: a drafter with weights: eagle, eagle3, mtp, medusa or draft_model. spec: of the target, a
    tiny one's; a draft_model has its vocabulary alone."""
    spec = spec or tiny_spec()
    shape = LayerShape.of_target(spec, 48)
    if name == "eagle":
        one = Eagle1Config(shape, spec.vocab_size)
        write_eagle1(folder, _random(one.tensor_shapes()), one)
    elif name == "eagle3":
        three = Eagle3Config(shape, spec.vocab_size, DRAFT_VOCAB, spec.hidden_size, (0, 1, 2))
        ids = vocabulary_tensors(sorted(range(3, 3 + DRAFT_VOCAB)), spec.vocab_size)
        write_eagle3(folder, _random(three.tensor_shapes()) | ids, three)
    elif name == "medusa":
        medusa = MedusaConfig(spec.hidden_size, 3, 1)
        write_medusa(folder, _random(medusa.tensor_shapes()), medusa)
    elif name == "mtp":
        mtp = MtpConfig(spec.hidden_size, spec.num_layers, 1, shape=LayerShape.of_target(spec, spec.intermediate_size))
        write_mtp(folder, _random(mtp_shapes(mtp)), mtp)
    else:
        write_tiny_model(folder, tiny_spec(spec.vocab_size, num_layers=1))


def _random(shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    norm = ("norm.weight", "layernorm.weight")
    return {
        name: torch.ones(shape) if name.endswith(norm) else torch.randn(shape, generator=generator) * 0.2
        for name, shape in shapes.items()
    }


def write_tiny_model(folder: Path, spec: ModelSpec) -> None:
    """A Llama of float32 weights; spec: ``tiny_spec``, of any vocabulary, depth and LM head."""
    bag = tiny_weights(spec, torch.float32, seed=4)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: bag.take(name) for name in model_shapes(spec)}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0],
    }
    (folder / "config.json").write_text(json.dumps(config))
