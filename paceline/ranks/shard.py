"""What each rank of a degree holds of a model, and which degrees a model has. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.model_files import quantization_config
from paceline.models.config import ModelSpec
from paceline.models.families import FAMILIES
from paceline.parallel.slabs import slabs_of, sum_slabs

MODEL = "paceline.models.llama:LlamaModel"  # whose layers can be dealt to ranks
VOCAB_BLOCK = 32  # rows of the vocabulary that stay together
MOST_RANKS = 64
TOGETHER = 16  # query heads of a KV head that AMX takes; more are computed in another order (kernels/attention.h)


@dataclass(frozen=True)
class Cut:
    """A run of the rows of a tensor, or of its columns. ``whole``: how many the tensor has."""

    run: range
    whole: int
    columns: bool = False


@dataclass(frozen=True)
class Shard:
    """The part of rank ``rank`` of ``degree``. ``spec``: of the whole model, which has that degree."""

    spec: ModelSpec
    degree: int
    rank: int

    @property
    def slabs(self) -> int:
        """Slabs of this rank's part of a row-parallel product."""
        return sum_slabs(self.spec.num_heads) // self.degree

    @property
    def replicas(self) -> int:
        """How many neighbouring ranks hold the same KV head."""
        return max(1, self.degree // self.spec.num_kv_heads)

    @property
    def heads(self) -> range:
        """Query heads."""
        return _part(self.spec.num_heads, self.degree, self.rank)

    @property
    def kv_heads(self) -> range:
        """KV heads: a run of them or, with more ranks than heads, a single one, as kv_transfer.layout.reshard deals
        them."""
        held = max(1, self.spec.num_kv_heads // self.degree)
        first = self.rank // self.replicas * held
        return range(first, first + held)

    @cached_property
    def vocab(self) -> range:
        """Rows of the embedding and of the LM head."""
        starts = self.vocab_starts
        return range(starts[self.rank], starts[self.rank + 1])

    @cached_property
    def vocab_starts(self) -> tuple[int, ...]:
        """The first row of the vocabulary of every rank, and the number of rows."""
        size = self.spec.vocab_size
        blocks = _vocab_blocks(size)
        return tuple(min(size, VOCAB_BLOCK * (blocks * rank // self.degree)) for rank in range(self.degree + 1))

    @cached_property
    def local_spec(self) -> ModelSpec:
        """The model as this rank's layers are made of it."""
        return replace(
            self.spec,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.spec.intermediate_size // self.degree,
            vocab_size=len(self.vocab),
        )

    @cached_property
    def _cuts(self) -> dict[str, Cut]:
        spec, dim, width = self.spec, self.spec.head_dim, self.spec.intermediate_size
        heads, num_heads = _times(self.heads, dim), spec.num_heads * dim
        kv_heads = Cut(_times(self.kv_heads, dim), spec.num_kv_heads * dim)
        wide, vocab = _part(width, self.degree, self.rank), Cut(self.vocab, spec.vocab_size)
        return {
            "q_proj": Cut(heads, num_heads),
            "k_proj": kv_heads,
            "v_proj": kv_heads,
            "o_proj": Cut(heads, num_heads, columns=True),
            "gate_proj": Cut(wide, width),
            "up_proj": Cut(wide, width),
            "down_proj": Cut(wide, width, columns=True),
            "embed_tokens": vocab,
            "lm_head": vocab,
        }

    def cut(self, name: str) -> Cut | None:
        """What this rank has of the tensor called ``name`` in a checkpoint; None: all of it."""
        layer, _, kind = name.rpartition(".")
        cut = self._cuts.get(layer.rpartition(".")[2])
        return None if cut is None or (cut.columns and kind == "bias") else cut


def degrees(spec: ModelSpec) -> tuple[int, ...]:
    """The numbers of ranks that a model can have, in ascending order."""
    return tuple(degree for degree in range(1, MOST_RANKS + 1) if _fits(spec, degree))


def check_degree(degree: int, spec: ModelSpec) -> None:
    """Raise ConfigError naming ``tp`` where a model of the Llama family cannot have ``degree`` ranks."""
    if not _fits(spec, degree):
        slabs, fitting = sum_slabs(spec.num_heads), ", ".join(map(str, degrees(spec)))
        raise ConfigError(
            "tp",
            f"{degree} ranks do not fit a model of {spec.num_heads} heads, {spec.num_kv_heads} KV heads and {slabs} "
            f"slabs: it can have {fitting}",
        )


def check_ranks(config: EngineConfig, spec: ModelSpec, raw: Mapping[str, Any]) -> None:
    """Raise ConfigError naming ``tp`` for what nodes of several ranks cannot serve, before anything is loaded.

    raw: the model's config.json; empty for a GGUF file.
    """
    if config.tp == 1:
        return
    asked = f"{config.tp} ranks are asked for, but "
    if FAMILIES_OF_RANKS.isdisjoint({spec.family}):
        names = ", ".join(sorted(FAMILIES_OF_RANKS))
        raise ConfigError("tp", f"{asked}a model of family {spec.family} has 1 (families with more: {names})")
    if not raw or quantization_config(raw) is not None or config.quantize != "none":
        raise ConfigError("tp", f"{asked}quantised weights have 1: take safetensors in bf16 or fp32, and quantize none")
    if config.device != "cpu":
        raise ConfigError("tp", f"{asked}device {config.device} has 1: nodes of several ranks run on cpu")
    check_degree(config.tp, spec)


FAMILIES_OF_RANKS = frozenset(family.name for family in FAMILIES.values() if family.model == MODEL)


def _fits(spec: ModelSpec, degree: int) -> bool:
    slabs = sum_slabs(spec.num_heads)
    whole = all(slabs_of(size, slabs) == slabs for size in (spec.num_heads * spec.head_dim, spec.intermediate_size))
    dealt = spec.num_kv_heads % degree == 0 or degree % spec.num_kv_heads == 0
    dealt = dealt and slabs % degree == 0 and _keeps_order(spec, degree)
    return degree == 1 or (whole and dealt and _vocab_blocks(spec.vocab_size) >= degree)


def _keeps_order(spec: ModelSpec, degree: int) -> bool:
    """Whether a rank's attention adds in the order of the whole model's. Ranks that share a KV head have fewer query
    heads of it."""
    group = spec.num_heads // spec.num_kv_heads
    return group <= TOGETHER or group // max(1, degree // spec.num_kv_heads) > TOGETHER


def _vocab_blocks(size: int) -> int:
    return -(-size // VOCAB_BLOCK)


def _part(size: int, degree: int, rank: int) -> range:
    held = size // degree
    return range(rank * held, (rank + 1) * held)


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)
