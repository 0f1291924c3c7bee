"""What a model would take, from what its checkpoint announces: a dry run of the code that loads it, with shapes alone.

Degrees are those that nodes have (ranks/degrees.py). Attention, MLPs, embedding and LM head are cut, experts live whole
on one rank each, norms and routers are everywhere. So are the latents of latent attention and what makes them, as all
heads read one row. The drafter is on the first rank, and so are MLPs of a family with experts that have no slabs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerOwner
from paceline.model_files import quantization_config
from paceline.models.announced import FLOATS, FP8, Announced, MetaTensors, read_announced
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.loader import WeightBag
from paceline.models.quantization.fp8 import Fp8
from paceline.models.registry import FP8_SCALE, KEPT_FLOAT32, ChosenTensors, model_class, scheme_of
from paceline.ranks.degrees import DENSE, SHARED, check_degree, mlps_of_ranks
from paceline.spec_decode.heads.formats.files import HeadFiles, Renamed
from paceline.spec_decode.heads.formats.mtp import read_mtp
from paceline.spec_decode.heads.mtp import MtpModule, mtp_kv_layers
from paceline.spec_decode.heads.shipped import shipped_heads
from paceline.speculation import DRAFTERS

META = torch.device("meta")
EVERYWHERE = "norms and routers"
ATTENTION = "attention"
LATENTS = "latent projections"  # that make the latents, and the input of the queries
DRAFTER = "drafter"
FIRST_MLPS = "MLPs of the first rank"
ON_FIRST = (DRAFTER, FIRST_MLPS)


@dataclass(frozen=True)
class WeightPart:
    """Weights of one kind, in bytes as a node holds them."""

    name: str
    num_bytes: int
    is_split: bool  # over the ranks; else on every one, or of ON_FIRST on the first

    def of_rank(self, degree: int, *, first: bool = True) -> int:
        """Bytes on one rank of ``degree``."""
        if self.name in ON_FIRST:
            return self.num_bytes if first else 0
        return -(-self.num_bytes // degree) if self.is_split else self.num_bytes


@dataclass(frozen=True)
class ModelPlan:
    """A model without its weights."""

    spec: ModelSpec
    num_tensors: int  # that the checkpoint announces; each was taken once
    parts: tuple[WeightPart, ...]
    token_bytes: int  # KV of one token, target layers
    draft_token_bytes: int  # the same of the drafter
    drafter: str  # what ``default`` drafts with
    refusals: tuple[str, ...]  # why a node would not load it

    def dealt(self, degree: int) -> ModelPlan:
        """Where sequences are dealt to the ranks (--attention-dp): each has whole attention layers, and rank 0 the
        drafter's KV of all."""
        parts = tuple(replace(part, is_split=part.is_split and part.name != ATTENTION) for part in self.parts)
        return replace(self, parts=parts, draft_token_bytes=degree * self.draft_token_bytes)

    def check_degree(self, degree: int) -> None:
        """Raise ConfigError, with the numbers, for a degree that the model cannot have."""
        check_degree(degree, self.spec)

    def weight_bytes(self, degree: int = 1) -> int:
        """Weights on the first rank, which has the drafter."""
        return sum(part.of_rank(degree) for part in self.parts)

    def kv_bytes(self, degree: int = 1) -> int:
        """KV of one token on the first rank, which has that of the drafter too."""
        return self.target_kv_bytes(degree) + self.draft_token_bytes

    def target_kv_bytes(self, degree: int = 1) -> int:
        """KV of one token on every rank but the first. With more ranks than KV heads, each has a whole head."""
        if self.spec.mla is not None:
            return self.token_bytes
        heads = self.spec.num_kv_heads
        return self.token_bytes * max(1, heads // degree) // heads


def plan_model(path: Path, dtype: torch.dtype, kv_dtype: str = "auto", on_gpu: bool = False) -> ModelPlan:
    """Load what ``path`` announces without its weights. Raises ConfigError naming every tensor that would be left over
    or is missing. kv_dtype: the option. on_gpu: of the node that is to hold it."""
    raw, announced = read_announced(path)
    spec = ModelSpec.from_json(raw, path)
    refusals = _refusals(raw)
    tensors = MetaTensors(announced, dtype)
    modules = spec.mtp_prefixes
    drafts = frozenset(name for name in tensors if name.startswith(modules))
    bag = WeightBag(ChosenTensors(tensors, frozenset(tensors) - drafts))
    model = model_class(spec.family)(spec, bag, dtype, META)
    bag.finish()
    draft_layers = _take_modules(HeadFiles(path, raw, tensors), model) if drafts else ()
    layout = KvLayout.of((*model.kv_layers, *draft_layers), dtype, kv_dtype)
    shipped = next((name for name in DRAFTERS if shipped_heads(str(path), name)), None)
    return ModelPlan(
        spec=spec,
        num_tensors=len(announced),
        parts=_parts(announced, spec, dtype, on_gpu),
        token_bytes=layout.token_bytes(LayerOwner.TARGET),
        draft_token_bytes=layout.token_bytes(LayerOwner.DRAFT),
        drafter=shipped or ("mtp" if drafts else "ngram"),
        refusals=refusals,
    )


def _refusals(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """What a node would say to how the weights are quantised. Raises ConfigError for a scheme that a node loads, but
    whose layers have other tensors than the names that are planned by."""
    try:
        scheme = scheme_of(raw)
    except ConfigError as refused:
        return (refused.message,)
    if scheme is not None and not (isinstance(scheme, Fp8) and scheme.block):
        method = (quantization_config(raw) or {}).get("quant_method")
        raise ConfigError("model", f"{method} checkpoints are served but not planned (floats, MXFP4, FP8 in blocks)")
    return ()


def _take_modules(files: HeadFiles, model: TargetModel) -> tuple[KvLayer, ...]:
    """Take the MTP modules' tensors as the drafter does; their KV layers."""
    first = model.spec.num_layers
    config, entries, _ = read_mtp(files, first)
    bag = WeightBag(Renamed(files.tensors, entries, model.dtype, META)).onto(META)
    for k in range(config.num_modules):
        MtpModule(model, bag, f"model.layers.{first + k}", first + k, model.rope_table())
    bag.finish()
    return mtp_kv_layers(model.kv_layers, config.num_modules)


def _parts(
    announced: Mapping[str, Announced], spec: ModelSpec, dtype: torch.dtype, on_gpu: bool
) -> tuple[WeightPart, ...]:
    sizes: dict[str, int] = {}
    modules, mlps = spec.mtp_prefixes, mlps_of_ranks(spec)
    for name, tensor in announced.items():
        part = DRAFTER if name.startswith(modules) else _part_of(name, mlps)
        if part == DRAFTER and name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            continue  # copies of the target's, which are not kept
        sizes[part] = sizes.get(part, 0) + _served_bytes(name, tensor, dtype, on_gpu)
    whole = {EVERYWHERE, LATENTS, *ON_FIRST}
    return tuple(WeightPart(name, sizes[name], name not in whole) for name in sorted(sizes))


def _part_of(name: str, mlps: frozenset[str]) -> str:
    """mlps: whose width ranks share, see ranks.degrees."""
    if "embed_tokens" in name or name.startswith("lm_head"):
        return "embedding and LM head"
    if ".experts." in name:
        return "experts"
    if "norm" in name or ".gate." in name or ".router." in name or name.endswith("sinks"):
        return EVERYWHERE
    if ".self_attn." in name:
        return LATENTS if "_a_proj" in name else ATTENTION
    return "MLPs" if (SHARED if f".{SHARED}." in name else DENSE) in mlps else FIRST_MLPS


def _served_bytes(name: str, tensor: Announced, dtype: torch.dtype, on_gpu: bool) -> int:
    """Memory that a node needs for it: floats in its dtype, FP8 as stored. MXFP4 as stored, with scales in float16, or
    unpacked on a GPU."""
    if name.endswith(FP8_SCALE) or name.endswith(KEPT_FLOAT32):
        return 4 * tensor.num_elements
    if tensor.dtype in FLOATS:
        return dtype.itemsize * tensor.num_elements
    if tensor.dtype == FP8:
        return tensor.num_elements
    if name.endswith("_blocks"):
        return (2 * dtype.itemsize if on_gpu else 1) * tensor.num_elements
    return 0 if on_gpu else 2 * tensor.num_elements  # MXFP4's scales
