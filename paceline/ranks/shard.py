"""What each rank of a degree holds of a model. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.models.config import ModelSpec
from paceline.parallel.slabs import sum_slabs
from paceline.ranks.degrees import DENSE, SHARED, VOCAB_BLOCK, mlps_of_ranks, vocab_blocks

if TYPE_CHECKING:
    from paceline.kvcache.layout import KvLayer

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in the name of a tensor of a single expert
MLP = re.compile(r"\.mlp\.(shared_experts\.|experts\.(\d+)\.)?(?:gate|up|down)_proj\.")  # of one MLP


@dataclass(frozen=True)
class Cut:
    """A run of the rows of a tensor, or of its columns. ``whole``: how many the tensor has."""

    run: range
    whole: int
    columns: bool = False

    @property
    def index(self) -> tuple[slice, ...]:
        """Where the run lies in its tensor."""
        run = slice(self.run.start, self.run.stop)
        return (slice(None), run) if self.columns else (run,)


@dataclass(frozen=True)
class Shard:
    """The part of rank ``rank`` of ``degree``. ``spec``: of the whole model, which has that degree."""

    spec: ModelSpec
    degree: int
    rank: int
    dealt: bool = False  # sequences are, to the ranks: each has whole attention layers (dealt.py)

    @property
    def slabs(self) -> int:
        """Slabs of this rank's part of a row-parallel product."""
        return sum_slabs(self.spec.num_heads) // self.degree

    def of_rank(self, rank: int) -> Shard:
        """The part of another rank."""
        return replace(self, rank=rank)

    def experts(self, count: int) -> range:
        """Those of ``count`` experts that this rank has, each of them whole."""
        return _part(count, self.degree, self.rank)

    @property
    def replicas(self) -> int:
        """How many neighbouring ranks hold the same KV head. Latents are not cut: they lie on all ranks."""
        return max(1, self.degree // self.spec.num_kv_heads)

    @property
    def heads(self) -> range:
        """Query heads."""
        if self.dealt:
            return range(self.spec.num_heads)
        return _part(self.spec.num_heads, self.degree, self.rank)

    @property
    def kv_heads(self) -> range:
        """KV heads: a run of them or, with more ranks than heads, a single one, as kv_transfer.layout.reshard deals
        them."""
        if self.dealt:
            return range(self.spec.num_kv_heads)
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
        blocks = vocab_blocks(size)
        return tuple(min(size, VOCAB_BLOCK * (blocks * rank // self.degree)) for rank in range(self.degree + 1))

    @cached_property
    def local_spec(self) -> ModelSpec:
        """The model as this rank's layers are made of it."""
        moe, shared = self.spec.moe, self.shared_mlps
        return replace(
            self.spec,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=self.spec.intermediate_size // (self.degree if DENSE in shared else 1),
            vocab_size=len(self.vocab),
            moe=None if moe is None else replace(moe, shared_by=self.degree if SHARED in shared else 1),
        )

    @cached_property
    def shared_mlps(self) -> frozenset[str]:
        """The MLPs whose width the ranks share, by the part of the name. Rank 0 has the others alone."""
        return mlps_of_ranks(self.spec)

    def held_layer(self, layer: KvLayer) -> KvLayer:
        """What this rank's pool has of a layer of the target."""
        return replace(layer, num_kv_heads=len(self.kv_heads)) if self.spec.mla is None else layer

    def whole_layer(self, layer: KvLayer) -> KvLayer:
        """The layer of the whole model, of one of this rank's."""
        return replace(layer, num_kv_heads=self.spec.num_kv_heads) if self.spec.mla is None else layer

    @cached_property
    def _cuts(self) -> dict[str, Cut]:
        spec, mla = self.spec, self.spec.mla
        query, value = (spec.head_dim, spec.head_dim) if mla is None else (mla.query_dim, mla.value_dim)
        vocab = Cut(self.vocab, spec.vocab_size)
        dense = self._of_width(spec.intermediate_size) if DENSE in self.shared_mlps else {}
        every = dense | {"embed_tokens": vocab, "lm_head": vocab}
        if self.dealt:
            return every
        found = {"q_proj": self._of_heads(query), "o_proj": self._of_heads(value, columns=True)}
        if mla is None:
            kv_heads = Cut(_times(self.kv_heads, query), spec.num_kv_heads * query)
            found |= {"k_proj": kv_heads, "v_proj": kv_heads, "sinks": self._of_heads(1)}
        else:
            found |= {"q_b_proj": self._of_heads(query), "kv_b_proj": self._of_heads(mla.nope_dim + value)}
        return found | every

    def _of_heads(self, size: int, *, columns: bool = False) -> Cut:
        """size: elements of a head."""
        return Cut(_times(self.heads, size), self.spec.num_heads * size, columns)

    def _of_width(self, width: int) -> dict[str, Cut]:
        """An MLP of ``width``."""
        wide = _part(width, self.degree, self.rank)
        rows = Cut(wide, width)
        return {"gate_proj": rows, "up_proj": rows, "down_proj": Cut(wide, width, columns=True)}

    def cut(self, name: str) -> Cut | None:
        """What this rank has of the tensor called ``name`` in a checkpoint; None: all of it."""
        layer, _, kind = name.rpartition(".")
        parent, _, last = layer.rpartition(".")
        moe = self.spec.moe
        if EXPERT.search(name):
            return None
        if moe is not None and last == "experts":  # all of a layer's in one tensor
            return Cut(self.experts(moe.num_experts), moe.num_experts)
        if moe is not None and parent.endswith(SHARED):
            shared = SHARED in self.shared_mlps
            cut = self._of_width(moe.num_shared_experts * moe.intermediate_size).get(last) if shared else None
        else:
            cut = self._cuts.get(kind if kind == "sinks" else last)
        return None if cut is None or (cut.columns and kind == "bias") else cut

    def holds(self, name: str) -> bool:
        """Whether this rank has any of the tensor called ``name``: no other rank's expert is here, nor an MLP that
        rank 0 has alone."""
        moe, mlp = self.spec.moe, MLP.search(name)
        if moe is None or mlp is None:
            return True
        if mlp[2] is not None:
            return int(mlp[2]) in self.experts(moe.num_experts)
        return self.rank == 0 or (SHARED if mlp[1] == "shared_experts." else DENSE) in self.shared_mlps


def _part(size: int, degree: int, rank: int) -> range:
    held = size // degree
    return range(rank * held, (rank + 1) * held)


def _times(run: range, size: int) -> range:
    return range(run.start * size, run.stop * size)
