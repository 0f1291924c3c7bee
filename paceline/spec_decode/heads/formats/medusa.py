"""Medusa checkpoints (algorithms.md F4): FasterDecoding's names are canonical, vLLM's are read too."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from paceline.spec_decode.heads.formats.config import MedusaConfig
from paceline.spec_decode.heads.formats.files import Entry, HeadFiles, check_names
from paceline.spec_decode.heads.formats.layer import refused

PREFIX = re.compile(r"^medusa_heads?\.")
FASTER_DECODING = re.compile(r"^\d+\.\d+\.(linear\.(weight|bias)|weight)$")
VLLM = re.compile(r"^(blocks\.\d+\.layers\.\d+\.(weight|bias)|lm_heads\.\d+\.weight|lm_head\.weight)$")
BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.weight$")
TOKEN_MAP = "token_map"


def plain_name(name: str) -> str:
    """A name without the module that some files put before it."""
    return PREFIX.sub("", name)


def read_medusa(files: HeadFiles) -> tuple[MedusaConfig, dict[str, Entry]]:
    """``{head}.{block}.linear.weight`` and ``.bias``, ``{head}.{num_blocks}.weight``, token_map. Raises ConfigError."""
    sources = {plain_name(name): name for name in files.names}
    what = f"{files.folder} (Medusa)"
    if not any(VLLM.match(name) for name in sources):
        config = _count(sources, {name: files.tensors[source] for name, source in sources.items()}, what)
        return config, {name: Entry(source) for name, source in sources.items()}
    kept, vocab = files.config.get("truncated_vocab_size"), files.config.get("vocab_size")
    if TOKEN_MAP not in sources and kept is not None and kept != vocab:
        raise refused(f"{what}: heads over {kept} of {vocab} tokens need a token_map; the tensor is missing")
    entries = _from_vllm(files, sources)
    shapes = {name: files.tensors[entry.source] for name, entry in entries.items()}
    config = _count(entries, shapes, what)
    if TOKEN_MAP in entries:  # a whole vocabulary matrix is cut to the map's rows
        config = MedusaConfig(
            config.hidden_size, config.num_heads, config.num_blocks, shapes[TOKEN_MAP].shape[0], mapped=True
        )
    return config, entries


def _count(names: Iterable[str], tensors: dict[str, torch.Tensor], what: str) -> MedusaConfig:
    """Heads and blocks from the names; every head must have the same."""
    pairs = [(int(m[1]), int(m[2])) for m in map(BLOCK.match, names) if m]
    if not pairs:
        raise refused(f"{what}: no heads; expected tensors such as 0.0.linear.weight")
    heads, blocks = 1 + max(head for head, _ in pairs), 1 + max(block for _, block in pairs)
    last = tensors.get(f"0.{blocks}.weight")
    config = MedusaConfig(
        hidden_size=tensors[f"{pairs[0][0]}.{pairs[0][1]}.linear.weight"].shape[-1],
        num_heads=heads,
        num_blocks=blocks,
        draft_vocab_size=0 if last is None else last.shape[0],
        mapped=TOKEN_MAP in tensors,
    )
    check_names(names, config.tensor_shapes(), what)
    return config


def _from_vllm(files: HeadFiles, sources: dict[str, str]) -> dict[str, Entry]:
    """``blocks.N.layers.M`` and ``lm_heads.N``; blocks without bias get zeros, one shared matrix serves all heads."""
    entries: dict[str, Entry] = {}
    ids = files.tensors[sources[TOKEN_MAP]] if TOKEN_MAP in sources else None
    blocks = [tuple(map(int, re.findall(r"\d+", n))) for n in sources if re.match(r"blocks\.\d+\.layers\.\d+\.w", n)]
    if not blocks:
        raise refused(f"{files.folder} (Medusa): no heads; expected tensors such as blocks.0.layers.0.weight")
    num_heads, num_blocks = 1 + max(head for head, _ in blocks), 1 + max(block for _, block in blocks)
    for name, source in sources.items():
        numbers = re.findall(r"\d+", name)
        if name == TOKEN_MAP:
            entries[name] = Entry(source)
        elif name.startswith("blocks.") and VLLM.match(name):
            head, block = numbers
            entries[f"{head}.{block}.linear.{name.rsplit('.', 1)[1]}"] = Entry(source)
        elif VLLM.match(name):
            shared = name == "lm_head.weight" or bool(files.config.get("original_lm_head"))
            for head in range(num_heads) if shared else [int(numbers[0])]:
                entries[f"{head}.{num_blocks}.weight"] = Entry(source, lambda weight: _rows(weight, ids))
        else:
            entries[name] = Entry(source)  # unknown: refused by name
    for head, block in blocks:
        bias = f"{head}.{block}.linear.bias"
        if bias not in entries and not files.config.get("medusa_fc_bias"):
            source = sources[f"blocks.{head}.layers.{block}.weight"]
            entries[bias] = Entry(source, lambda weight: torch.zeros(weight.shape[0]))
    return entries


def _rows(weight: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The rows of a vocabulary matrix that the heads draft: all, or those of the map."""
    if ids is None or weight.shape[0] == ids.shape[0]:
        return weight
    if weight.shape[0] < ids.shape[0] or not 0 <= int(ids.min()) <= int(ids.max()) < weight.shape[0]:
        raise refused(f"token_map has {ids.shape[0]} ids that do not fit a vocabulary matrix of {weight.shape[0]} rows")
    return weight[ids.long()]
