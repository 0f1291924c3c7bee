"""Draft heads from disk: which public format a folder holds (algorithms.md F), and its tensors under canonical names.

Detection (F9) looks at config.json and the tensor names, never at the folder's name. Reading takes every tensor
exactly once, refuses unknown ones by name, and checks shapes against the config: a head that is loaded wrongly would
not change the text, only be accepted less, and nobody would notice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.layers.linear import Linear
from paceline.models.base import TargetModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.eagle import Eagle1Head, Eagle3Head
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, HeadConfig, HeadKind
from paceline.spec_decode.heads.formats.eagle import read_eagle1, read_eagle3, vocabulary_map
from paceline.spec_decode.heads.formats.files import (
    Entry,
    HeadFiles,
    Renamed,
    blaming_drafter_path,
    check_shapes,
    head_digest,
    open_head,
)
from paceline.spec_decode.heads.formats.layer import refused
from paceline.spec_decode.heads.formats.medusa import FASTER_DECODING, VLLM, plain_name, read_medusa
from paceline.spec_decode.heads.formats.mtp import MIMO, QWEN, mtp_layers, mtp_shapes, read_mtp

CPU = torch.device("cpu")


class HeadFormat(enum.StrEnum):
    """Public formats."""

    EAGLE3_SPECULATORS = "eagle3-speculators"  # F3
    MEDUSA = "medusa"  # F4, FasterDecoding
    MEDUSA_VLLM = "medusa-vllm"  # F4
    EAGLE3 = "eagle3"  # F2
    EAGLE1 = "eagle1"  # F1, also EAGLE-2
    MTP_DEEPSEEK = "mtp-deepseek"  # F5, F6: layers after the target's last
    MTP_NEXTN = "mtp-nextn"  # F5: layer 0 of an export
    MTP_MIMO = "mtp-mimo"  # F7
    MTP_QWEN = "mtp-qwen"  # F8


@dataclass(frozen=True)
class CanonicalHead:
    """A head as read: ``bag()`` gives its tensors, of the dtype asked for, each to be taken exactly once."""

    kind: HeadKind
    format: HeadFormat
    config: HeadConfig
    tensors: Mapping[str, Any]  # canonical names; a tensor, or a QuantizedWeight
    digest: str  # identity of the weights, 32 hex digits
    # MTP: {module}.embed_tokens.weight and {module}.shared_head.head.weight, which ``check_copies`` compares.
    copies: Mapping[str, Any] = field(default_factory=dict)

    def bag(self) -> WeightBag:
        """The tensors for a constructor."""
        return WeightBag(self.tensors)


def detect(folder: Path) -> HeadFormat:
    """The format of a folder (F9). Raises ConfigError saying what was looked for."""
    return _detect(open_head(folder))


def _detect(files: HeadFiles) -> HeadFormat:
    config, names = files.config, files.names
    if (kind := config.get("speculators_model_type")) is not None:
        if kind != "eagle3":
            raise refused(f"{files.folder}: speculators_model_type {kind!r} is not supported (eagle3)")
        return HeadFormat.EAGLE3_SPECULATORS
    plain = [plain_name(name) for name in names]
    if any(VLLM.match(name) and name.startswith("blocks.") for name in plain):
        return HeadFormat.MEDUSA_VLLM
    if any(key.startswith("medusa_") for key in config) or any(FASTER_DECODING.match(name) for name in plain):
        return HeadFormat.MEDUSA
    if {"draft_vocab_size", "eagle_config"} & set(config) or any(name.startswith("midlayer.") for name in names):
        return HeadFormat.EAGLE3
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return HeadFormat.EAGLE1
    if any(MIMO.match(name) for name in names):
        return HeadFormat.MTP_MIMO
    if any(name.startswith(QWEN) for name in names):
        return HeadFormat.MTP_QWEN
    if layers := mtp_layers(names):
        return HeadFormat.MTP_NEXTN if layers[0] == 0 else HeadFormat.MTP_DEEPSEEK
    raise refused(
        f"{files.folder} holds no draft head that is known here: neither EAGLE-1/2/3, Medusa nor MTP modules; "
        f"its tensors begin with {', '.join(names[:5])}"
    )


def read_head(
    folder: Path, dtype: torch.dtype, device: torch.device = CPU, first_layer: int | None = None
) -> CanonicalHead:
    """Read a head of any format. Raises ConfigError naming what is missing, unknown or misshapen.

    first_layer: for MTP, the number of the first module in the canonical names ``model.layers.N.*``, so the target's
    layer count; None keeps what the files say. A target's whole checkpoint gives its MTP modules.
    """
    files = open_head(folder)
    found = _detect(files)
    copies: Mapping[str, Entry] = {}
    config: HeadConfig
    match found:
        case HeadFormat.EAGLE1:
            kind, (config, entries) = HeadKind.EAGLE1, read_eagle1(files)
            shapes = config.tensor_shapes()
        case HeadFormat.EAGLE3 | HeadFormat.EAGLE3_SPECULATORS:
            kind, (config, entries) = HeadKind.EAGLE3, read_eagle3(files)
            shapes = config.tensor_shapes()
        case HeadFormat.MEDUSA | HeadFormat.MEDUSA_VLLM:
            kind, (config, entries) = HeadKind.MEDUSA, read_medusa(files)
            shapes = config.tensor_shapes()
        case _:
            kind, (config, entries, copies) = HeadKind.MTP, read_mtp(files, first_layer)
            shapes = mtp_shapes(config)
    tensors = Renamed(files.tensors, entries, dtype, device)
    check_shapes(tensors, shapes, str(folder))
    if isinstance(config, Eagle3Config) and config.mapped:
        vocabulary_map(tensors["d2t"], tensors["t2d"])
    with blaming_drafter_path():
        digest = head_digest(folder)
    return CanonicalHead(kind, found, config, tensors, digest, Renamed(files.tensors, copies, dtype, device))


def check_copies(read: CanonicalHead, model: TargetModel) -> None:
    """Raise ConfigError when an embedding or LM head that came with MTP modules is not the target's, which they share.

    The LM head is compared through scores of a few random rows: the model keeps its own packed.
    """
    every = torch.arange(model.spec.vocab_size, device=model.device)
    probe = torch.randn(4, model.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(device=model.device, dtype=model.dtype)
    for name, copy in read.copies.items():
        if name.endswith("embed_tokens.weight"):
            same = torch.equal(copy, model.embed(every))
        else:
            head = WeightBag({}).rounded(model.quantize).as_head(copy)
            same = torch.equal(Linear(head, out_float32=True)(probe), model.logits(probe))
        if not same:
            raise refused(f"MTP module {name} is not a copy of the target's: modules with their own are not supported")


def load_head(folder: Path, model: TargetModel, first_kv_layer: int) -> tuple[DraftHead, str]:
    """An EAGLE head for ``model`` and a digest of its weights; its KV is layer ``first_kv_layer`` of the pool.

    Raises ConfigError when the folder holds something else or does not fit the target.
    """
    read = read_head(folder, model.dtype, model.device)
    bag = read.bag().onto(model.device, model.dtype).rounded(model.quantize)
    head: DraftHead
    with blaming_drafter_path():
        if isinstance(read.config, Eagle1Config):
            head = Eagle1Head(model, bag, read.config, first_kv_layer)
        elif isinstance(read.config, Eagle3Config):
            head = Eagle3Head(model, bag, read.config, first_kv_layer)
        else:
            raise refused(f"{folder} holds {read.kind} weights; choose the {read.kind} drafter for them")
        bag.finish()
    return head, read.digest
