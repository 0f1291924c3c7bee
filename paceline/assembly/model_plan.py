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

from paceline.assembly.planned_gguf import open_planned
from paceline.assembly.planned_weights import FLOAT32, FLOAT32_NORMS, Node, PlannedWeights, Steps
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerOwner
from paceline.layers.linear import group_of
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.model_files import read_json
from paceline.models.announced import Announced, MetaTensors, read_announced
from paceline.models.base import TargetModel
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.loader import WeightBag
from paceline.models.quantization.base import DryScheme, Scheme
from paceline.models.quantization.tensors import QuantizedTensors
from paceline.models.registry import FP8_SCALE, ChosenTensors, model_class, scheme_of
from paceline.models.weight_files import gguf_file
from paceline.parallel.slabs import slabs_of, sum_slabs
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
MLPS = "MLPs"
DRAFTER = "drafter"
FIRST_MLPS = "MLPs of the first rank"
ON_FIRST = (DRAFTER, FIRST_MLPS)


@dataclass(frozen=True)
class WeightPart:
    """Weights of one kind, in bytes as a node holds them."""

    name: str
    num_bytes: int
    is_split: bool  # over the ranks; else on every one, or of ON_FIRST on the first
    steps: tuple[Steps, ...] = ()  # of weights whose columns are split

    def of_rank(self, degree: int, *, first: bool = True) -> int:
        """Bytes on one rank of ``degree``."""
        if self.name in ON_FIRST:
            return self.num_bytes if first else 0
        if not self.is_split:
            return self.num_bytes
        return -(-self.num_bytes // degree) + sum(steps.of_rank(degree) for steps in self.steps)


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
    parted: str = ""  # a weight whose groups ranks would part; empty where none has

    def dealt(self, degree: int) -> ModelPlan:
        """Where sequences are dealt to the ranks (--attention-dp): each has whole attention layers, and rank 0 the
        drafter's KV of all."""
        parts = tuple(replace(part, is_split=part.is_split and part.name != ATTENTION) for part in self.parts)
        return replace(self, parts=parts, draft_token_bytes=degree * self.draft_token_bytes)

    def check_degree(self, degree: int) -> None:
        """Raise ConfigError, with the numbers, for a degree that the model cannot have."""
        check_degree(degree, self.spec)
        if degree > 1 and self.parted:
            raise ConfigError(
                "tp", f"{degree} ranks are asked for, but they part groups of {self.parted}: it can have 1"
            )

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
    or is missing, and for quantised layers that cannot be read. kv_dtype: the option. on_gpu: of the node that is to
    hold it."""
    raw, announced, tensors, refusals = _opened(path, dtype)
    spec, node = ModelSpec.from_json(raw, path), Node(dtype, on_gpu)
    modules = spec.mtp_prefixes
    drafts = frozenset(name for name in tensors if name.startswith(modules))
    build = model_class(spec.family)
    float32 = FLOAT32_NORMS if build.float32_norms else FLOAT32
    chosen = ChosenTensors(tensors, frozenset(tensors) - drafts)
    weights = PlannedWeights(chosen, announced, node, float32=float32)
    bag = WeightBag(weights)
    model = build(spec, bag, dtype, META)
    sizes, steps, parted = weights.sizes(), weights.steps(), _parted(weights.read, spec)
    _take_no_biases(bag, announced)
    bag.finish()
    draft_layers, drafter_bytes = _take_modules(path, raw, announced, tensors, model, node) if drafts else ((), 0)
    parts = _parts(sizes, steps, spec, drafter_bytes)
    layout = KvLayout.of((*model.kv_layers, *draft_layers), dtype, kv_dtype)
    shipped = next((name for name in DRAFTERS if shipped_heads(str(path), name)), None)
    return ModelPlan(
        spec=spec,
        num_tensors=len(announced),
        parts=parts,
        token_bytes=layout.token_bytes(LayerOwner.TARGET),
        draft_token_bytes=layout.token_bytes(LayerOwner.DRAFT),
        drafter=shipped or ("mtp" if drafts else "ngram"),
        refusals=refusals,
        parted=parted,
    )


def _opened(
    path: Path, dtype: torch.dtype
) -> tuple[dict[str, Any], Mapping[str, Announced], Mapping[str, LinearWeight], tuple[str, ...]]:
    """config.json, the tensors that there are, those that a node makes of them, and what it would say to them."""
    if (folder := _folder_of_gguf(path)) is not None:
        raw = read_json(folder / "config.json")
        tensors = open_planned(folder, dtype)
        return raw, tensors.announced(), tensors, ()
    raw, announced = read_announced(path)
    scheme, refusals = _scheme(raw)
    return raw, announced, _tensors(announced, scheme, dtype), refusals


def _folder_of_gguf(path: Path) -> Path | None:
    """The folder that a node makes of a GGUF file, or of a folder with one; None for what is neither."""
    one = gguf_file(path) is not None if path.is_dir() else path.suffix == ".gguf" and path.is_file()
    return resolve_model(str(path)) if one else None


def _scheme(raw: Mapping[str, Any]) -> tuple[Scheme | None, tuple[str, ...]]:
    """How the weights are quantised, and what a node would say to it."""
    try:
        return scheme_of(raw), ()
    except ConfigError as refused:
        return None, (refused.message,)


def _tensors(
    announced: Mapping[str, Announced], scheme: Scheme | None, dtype: torch.dtype
) -> Mapping[str, LinearWeight]:
    if scheme is not None:
        return QuantizedTensors(MetaTensors(announced, dtype), DryScheme(scheme), dtype)
    return MetaTensors({name: tensor for name, tensor in announced.items() if not name.endswith(FP8_SCALE)}, dtype)


def _take_no_biases(bag: WeightBag, announced: Mapping[str, Announced]) -> None:
    """Take the biases that GPTQ's writers put beside layers that have none. They are zeros, which nobody sees here."""
    for name in announced:
        if name.endswith(".qweight") and bag.holds(bias := f"{name.removesuffix('.qweight')}.bias"):
            bag.take(bias)


def _parted(weights: Mapping[str, LinearWeight], spec: ModelSpec) -> str:
    """The first weight whose groups the model's slabs part, so that ranks cannot share it; empty where none has."""
    mlps, slabs = mlps_of_ranks(spec), sum_slabs(spec.num_heads)
    for name, weight in weights.items():
        codes = _columns_are_split(name, mlps) and isinstance(weight, QuantizedWeight)
        if codes and slabs_of(weight.shape[1], slabs, group_of(weight)) != slabs:
            return name
    return ""


def _columns_are_split(name: str, mlps: frozenset[str]) -> bool:
    """mlps: see _part_of."""
    return name.endswith(("o_proj.weight", "down_proj.weight")) and _part_of(name, mlps) in (ATTENTION, MLPS)


def _take_modules(
    path: Path,
    raw: dict[str, Any],
    announced: Mapping[str, Announced],
    tensors: Mapping[str, LinearWeight],
    model: TargetModel,
    node: Node,
) -> tuple[tuple[KvLayer, ...], int]:
    """Take the MTP modules' tensors as the drafter does; their KV layers, and the bytes that they need."""
    first = model.spec.num_layers
    config, entries, _ = read_mtp(HeadFiles(path, raw, tensors), first)
    renamed = Renamed(tensors, entries, model.dtype, META)
    weights = PlannedWeights(renamed, announced, node, {name: entry.source for name, entry in entries.items()})
    bag = WeightBag(weights).onto(META, node.dtype)
    for k in range(config.num_modules):
        MtpModule(model, bag, f"model.layers.{first + k}", first + k, model.rope_table())
    num_bytes = sum(weights.sizes().values())
    bag.finish()
    return mtp_kv_layers(model.kv_layers, config.num_modules), num_bytes


def _parts(
    sizes: Mapping[str, int], steps: Mapping[str, Steps], spec: ModelSpec, drafter_bytes: int
) -> tuple[WeightPart, ...]:
    """sizes: bytes of the target's weights, by name; steps: of those that have any."""
    found, split = {DRAFTER: drafter_bytes} if drafter_bytes else dict[str, int](), dict[str, list[Steps]]()
    mlps = mlps_of_ranks(spec)
    for name, num_bytes in sizes.items():
        part = _part_of(name, mlps)
        found[part] = found.get(part, 0) + num_bytes
        if name in steps and _columns_are_split(name, mlps):
            split.setdefault(part, []).append(steps[name])
    whole = {EVERYWHERE, LATENTS, *ON_FIRST}
    return tuple(WeightPart(name, found[name], name not in whole, (*split.get(name, ()),)) for name in sorted(found))


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
    return MLPS if (SHARED if f".{SHARED}." in name else DENSE) in mlps else FIRST_MLPS
