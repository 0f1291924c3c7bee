"""Write heads in their public formats: bf16 safetensors and config.json. What is written here reads back the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.spec_decode.heads.formats.config import (
    Eagle1Config,
    Eagle3Config,
    MedusaConfig,
    MtpConfig,
    aux_config_ids,
)
from paceline.spec_decode.heads.formats.eagle import VARIANTS, vocabulary_map
from paceline.spec_decode.heads.formats.files import check_names, check_shapes
from paceline.spec_decode.heads.formats.layer import Shapes
from paceline.spec_decode.heads.formats.medusa import TOKEN_MAP
from paceline.spec_decode.heads.formats.mtp import mtp_shapes

Tensors = Mapping[str, torch.Tensor]
MODEL_FILE, MEDUSA_FILE = "model.safetensors", "medusa_lm_head.safetensors"


def write_eagle1(folder: Path, tensors: Tensors, config: Eagle1Config) -> None:
    """F1. ``tensors`` under canonical names, exactly those of ``config``; ConfigError names what differs."""
    raw = config.shape.to_json() | {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "bias": config.bias,
    }
    _write(folder, MODEL_FILE, tensors, config.tensor_shapes(), raw)


def write_eagle3(folder: Path, tensors: Tensors, config: Eagle3Config) -> None:
    """F2; ``vocabulary_tensors`` makes d2t and t2d."""
    raw = config.shape.to_json() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {"use_aux_hidden_state": True},
    }
    if config.aux_layers is not None:
        raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = aux_config_ids(config.aux_layers)
    raw |= {name: True for name in VARIANTS if getattr(config, name)}
    shapes = config.tensor_shapes()
    if config.mapped and {"d2t", "t2d"} <= set(tensors):
        vocabulary_map(tensors["d2t"], tensors["t2d"])
    _write(folder, MODEL_FILE, tensors, shapes, raw)


def write_medusa(folder: Path, tensors: Tensors, config: MedusaConfig, base_model: str = "") -> None:
    """F4, FasterDecoding. base_model: name of the target, for other readers."""
    raw = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": base_model,
    }
    _write(folder, MEDUSA_FILE, tensors, config.tensor_shapes(), raw)


def write_mtp(folder: Path, tensors: Tensors, config: MtpConfig) -> None:
    """F5, modules alone. Raises ValueError without the shape of the block."""
    if config.shape is None:
        raise ValueError("only modules around a plain decoder layer can be written")
    raw = config.shape.to_json() | {
        "num_hidden_layers": config.first_layer,
        "num_nextn_predict_layers": config.num_modules,
        "mtp_chained": config.chained,
    }
    _write(folder, MODEL_FILE, tensors, mtp_shapes(config), raw)


def _write(folder: Path, file: str, tensors: Tensors, shapes: Shapes, raw: Mapping[str, Any]) -> None:
    check_names(tensors, shapes, f"tensors for {folder}")
    check_shapes(tensors, shapes, f"tensors for {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: _stored(name, tensor) for name, tensor in tensors.items()}
    save_file(stored, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(raw), indent=2) + "\n", encoding="utf-8")


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Weights in bf16, offsets and ids in int64, the mask as it is; memory of its own, as safetensors wants."""
    if tensor.is_floating_point():
        tensor = tensor.to(torch.bfloat16)
    elif name in ("d2t", TOKEN_MAP):
        tensor = tensor.long()
    return tensor.detach().cpu().contiguous().clone()
