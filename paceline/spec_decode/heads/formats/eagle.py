"""EAGLE-1/2 and EAGLE-3 checkpoints (algorithms.md F1, F2, F3) to canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from paceline.models.loader import HARMLESS
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, aux_input_layers
from paceline.spec_decode.heads.formats.files import Entry, HeadFiles, check_names
from paceline.spec_decode.heads.formats.layer import LayerShape, number, refused

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TARGET_IDS = "draft_id_to_target_id"  # vLLM's name of d2t


def read_eagle1(files: HeadFiles) -> tuple[Eagle1Config, dict[str, Entry]]:
    """F1, canonical already. Raises ConfigError."""
    raw, names = files.config, _useful(files)
    _one_layer(raw)
    bias = "fc.bias" in names
    if raw.get("bias") is not None and bool(raw["bias"]) != bias:
        raise refused(
            f"{files.folder}: config.json says bias {raw['bias']}, but fc.bias is {'' if bias else 'not '}there"
        )
    config = Eagle1Config(
        shape=LayerShape.from_json(raw, names, "layers.0"),
        vocab_size=number(raw, "vocab_size"),
        bias=bias,
        own_embedding="embed_tokens.weight" in names,
    )
    check_names(names, config.tensor_shapes(), f"{files.folder} (EAGLE-1)")
    return config, {name: Entry(name) for name in names}


def read_eagle3(files: HeadFiles) -> tuple[Eagle3Config, dict[str, Entry]]:
    """F2 and F3: ``layers.0.`` is ``midlayer.``, ``draft_id_to_target_id`` is ``d2t``. Raises ConfigError."""
    entries: dict[str, Entry] = {}
    for source in _useful(files):
        name = f"midlayer.{source.removeprefix('layers.0.')}" if source.startswith("layers.0.") else source
        name = "d2t" if name == TARGET_IDS else name
        if name in entries:
            raise refused(f"{files.folder}: {source} and {entries[name].source} are the same tensor")
        entries[name] = Entry(source)
    config = _eagle3_config(files.config, list(entries))
    if config.mapped and "t2d" not in entries and "d2t" in entries:
        entries["t2d"] = Entry(entries["d2t"].source, lambda d2t: _mask(d2t, config.vocab_size))
    check_names(entries, config.tensor_shapes(), f"{files.folder} (EAGLE-3)")
    return config, entries


def _useful(files: HeadFiles) -> list[str]:
    return [name for name in files.names if not name.endswith(HARMLESS)]


def _one_layer(raw: Mapping[str, Any]) -> None:
    if (layers := raw.get("num_hidden_layers", 1)) != 1:
        raise refused(f"heads of {layers} layers are not supported (1)")


def _eagle3_config(raw: Mapping[str, Any], names: Seq[str]) -> Eagle3Config:
    """``names`` are canonical. What speculators nests in ``transformer_layer_config`` the original has on top."""
    layer = raw.get("transformer_layer_config") or raw
    eagle = raw.get("eagle_config") or {}
    if not isinstance(layer, dict) or not isinstance(eagle, dict):
        raise refused("transformer_layer_config and eagle_config must be objects")
    _one_layer(layer)
    if not eagle.get("use_aux_hidden_state", True):
        raise refused("EAGLE-3 heads without auxiliary hidden states (use_aux_hidden_state false) are not supported")
    shape = LayerShape.from_json(layer, names, "midlayer")
    vocab = number(layer, "vocab_size")
    draft_vocab = number(raw, "draft_vocab_size", vocab)
    mapped = "d2t" in names or "t2d" in names
    if not mapped and draft_vocab != vocab:
        raise refused(f"a draft vocabulary of {draft_vocab} of {vocab} tokens needs d2t; the tensor is missing")
    flags = {name: bool(raw.get(name, eagle.get(name, False))) for name in VARIANTS}
    ids = raw.get("eagle_aux_hidden_state_layer_ids", eagle.get("eagle_aux_hidden_state_layer_ids"))
    return Eagle3Config(
        shape=shape,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=number(raw, "target_hidden_size", shape.hidden_size),
        aux_layers=aux_input_layers(ids),
        own_embedding="embed_tokens.weight" in names,
        mapped=mapped,
        **flags,
    )


# ---- the vocabulary map


def vocabulary_tensors(token_ids: Seq[int], vocab_size: int) -> dict[str, torch.Tensor]:
    """``d2t`` and ``t2d`` of a draft vocabulary: ascending ids of the target's tokens."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    d2t = ids - torch.arange(len(ids))
    tensors = {"d2t": d2t, "t2d": _mask(d2t, vocab_size)}
    vocabulary_map(tensors["d2t"], tensors["t2d"])
    return tensors


def vocabulary_map(d2t: torch.Tensor, t2d: torch.Tensor) -> torch.Tensor:
    """Target ids of the draft vocabulary, int64 [draft_vocab]: arange + d2t, since d2t stores OFFSETS.

    t2d: bool [vocab_size], true at exactly these ids. Raises ConfigError where the two disagree.
    """
    if d2t.is_floating_point() or d2t.dtype is torch.bool or t2d.dtype is not torch.bool:
        raise refused(f"d2t must hold integers and t2d booleans, got {d2t.dtype} and {t2d.dtype}")
    ids = torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()
    if not torch.equal(t2d.nonzero().flatten(), ids):
        raise refused("d2t and t2d disagree: t2d must be true at exactly arange + d2t (d2t stores offsets, not ids)")
    return ids


def _mask(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    ids = torch.arange(d2t.shape[0]) + d2t.long()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise refused(f"d2t leads to token ids outside 0..{vocab_size - 1} (it stores offsets, not ids)")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return mask
