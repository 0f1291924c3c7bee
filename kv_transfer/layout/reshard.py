"""Which slices of the KV travel between two sides whose ranks hold different heads: a pure function.

docs/internals/handoff.md#what-crosses says what travels, algorithms.md H4 in which order its bytes lie.

A side runs on ``degree`` ranks. A rank holds a run of the heads of a GQA layer: ``num_kv_heads / degree`` of them or,
with more ranks than heads, a single one, which ``degree / num_kv_heads`` neighbouring ranks hold alike. An MLA latent
is one head that every rank holds. Layers of the drafter lie on rank 0 alone, whole.

A destination rank gets each of its heads from exactly one source rank. Where several hold a head, the destinations
that need it are dealt to them in order and evenly: with N destinations and R sources, the i-th one is served by source
``i * R // N``. For equal degrees that is rank r to rank r, and a destination has no more sources than its heads need.

What two ranks have in common of a layer is one run of heads, so a pair has at most one slice per layer, however many
heads it covers (the number of pieces, not of bytes, is what a copy costs). On the wire the order is canonical (layer,
token, then K heads, then V heads) over the heads of the slice. Both ends call `reshard` with the same two sides and get
the same plan; its ``name`` crosses in Begin and a different one is refused.

Where all rows pass through rank 0 of a node, it gathers the heads of all of its ranks: one plan of one rank a side, in
which every head crosses. Where ranks have lanes to ranks (kv_transfer/lanes/), each pair has a plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner

# (source, destination): rows may be rounded on the way, where the deployment allows it (kv_transfer/layout/compat.py).
CASTS = frozenset({(torch.float32, torch.bfloat16)})


def num_heads(layer: KvLayer) -> int:
    """How many heads of a layer can be dealt to ranks; a latent cannot be cut."""
    return 1 if layer.kind is LayerKind.MLA else layer.num_kv_heads


def is_draft(layer: KvLayer) -> bool:
    """Whether rank 0 alone holds a layer."""
    return layer.owner is LayerOwner.DRAFT


@dataclass(frozen=True)
class Side:
    """One rank of a side. ``layout``: of the whole model, which is what a fingerprint carries.

    ConfigError naming ``shard_degree`` when the heads of a layer cannot be dealt to ``degree`` ranks, ``shard_rank``
    when there is no such rank.
    """

    layout: KvLayout
    degree: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if self.degree < 1:
            raise ConfigError("shard_degree", f"must be at least 1, got {self.degree}")
        if not 0 <= self.rank < self.degree:
            raise ConfigError("shard_rank", f"{self.rank} is outside the {self.degree} ranks of its side")
        for index, layer in enumerate(self.layout.layers):
            heads = num_heads(layer)
            if heads % self.degree and self.degree % heads and not is_draft(layer):
                raise ConfigError(
                    "shard_degree",
                    f"{self.degree} ranks neither divide nor are a multiple of the {heads} KV heads of layer {index} "
                    f"({layer.text()})",
                )

    def replicas(self, layer: int) -> int:
        """How many ranks of this side hold the same head of ``layer``."""
        return max(1, self.degree // num_heads(self.layout.layers[layer]))

    def heads(self, layer: int) -> range:
        """The heads of ``layer`` that this rank holds, numbered over the whole model."""
        if is_draft(self.layout.layers[layer]):
            return range(0 if self.rank else num_heads(self.layout.layers[layer]))
        held = max(1, num_heads(self.layout.layers[layer]) // self.degree)
        first = self.rank // self.replicas(layer) * held
        return range(first, first + held)

    @cached_property
    def local(self) -> KvLayout:
        """The layout of this rank's pool."""
        layers = (
            layer if layer.kind is LayerKind.MLA else replace(layer, num_kv_heads=len(self.heads(index)))
            for index, layer in enumerate(self.layout.layers)
            if self.rank == 0 or not is_draft(layer)
        )
        return self.layout.with_layers(layers)


@dataclass(frozen=True)
class HeadSlice:
    """What a pair moves of one layer: heads ``source_head ..+ num_heads`` of the source's pool to ``dest_head ..`` of
    the destination's (both numbered in their own pool), ``width`` elements each. A GQA layer moves them twice, K then
    V; an MLA layer once."""

    layer: int
    source_head: int
    dest_head: int
    num_heads: int
    width: int


@dataclass(frozen=True)
class ReshardPlan:
    """What crosses from one source rank to one destination rank. Made by `reshard`.

    ``slices``: in order of layer, at most one each; a layer without one does not cross between these two.
    """

    source: Side
    dest: Side
    slices: tuple[HeadSlice, ...]

    @cached_property
    def wire(self) -> KvLayout:
        """The layout of the rows on the wire, of the destination's dtype; a layer that does not cross has width 0."""
        layers = [replace(layer, num_kv_heads=0, head_dim=0) for layer in self.dest.layout.layers]
        for part in self.slices:
            layer = self.dest.layout.layers[part.layer]
            layers[part.layer] = layer if layer.kind is LayerKind.MLA else replace(layer, num_kv_heads=part.num_heads)
        return self.dest.layout.with_layers(layers)

    @cached_property
    def name(self) -> str:
        """Equal at both ends if and only if they mean the same bytes; empty when neither side is sharded.

        For example ``1/2>0/1#5f0c2b7a91d3e846``: source rank 1 of 2 to the only destination, and a digest of the rows.
        """
        if self.source.degree == self.dest.degree == 1:
            return ""
        # The source's dtype is left out: decode issues tickets before it knows who will send.
        held = (KvLayout(side.local.layers, self.wire.dtype).text() for side in (self.source, self.dest))
        parts = (f"{p.layer}:{p.source_head}>{p.dest_head}+{p.num_heads}x{p.width}" for p in self.slices)
        text = " | ".join((*held, self.wire.text(), *parts))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        source, dest = (f"{side.rank}/{side.degree}" for side in (self.source, self.dest))
        return f"{source}>{dest}#{digest}"


def sending_rank(source_degree: int, dest: Side, layer: int, head: int) -> int:
    """The one source rank that sends ``head`` of ``layer`` to ``dest``, which must hold it."""
    if is_draft(dest.layout.layers[layer]):
        return 0
    source = Side(dest.layout, source_degree)
    held = max(1, num_heads(dest.layout.layers[layer]) // source_degree)
    copies = source.replicas(layer)
    turn = dest.rank % dest.replicas(layer)  # which of the destinations that hold this head
    return head // held * copies + turn * copies // dest.replicas(layer)


def reshard(source: Side, dest: Side) -> ReshardPlan:
    """The slices that ``source`` sends to ``dest``; none when the two have nothing to exchange.

    ConfigError naming ``layout`` when the sides hold different models, ``dtype`` when the source's rows cannot become
    the destination's.
    """
    if source.layout.layers != dest.layout.layers:
        raise ConfigError("layout", f"prefill holds {source.layout.text()}, decode {dest.layout.text()}")
    dtypes = source.layout.dtype, dest.layout.dtype
    if dtypes[0] is not dtypes[1] and dtypes not in CASTS:
        raise ConfigError("dtype", f"rows of {dtypes[0]} cannot be handed to a pool of {dtypes[1]}")
    slices = []
    for index, layer in enumerate(dest.layout.layers):
        held, wanted = source.heads(index), dest.heads(index)
        common = range(max(held.start, wanted.start), min(held.stop, wanted.stop))
        sent = [head for head in common if sending_rank(source.degree, dest, index, head) == source.rank]
        if sent:  # all of them: a rank that shares its head with others holds no second one
            slices.append(HeadSlice(index, sent[0] - held.start, sent[0] - wanted.start, len(sent), layer.head_dim))
    return ReshardPlan(source, dest, tuple(slices))


def plans_into(layout: KvLayout, source_degree: int, dest: Side) -> tuple[ReshardPlan, ...]:
    """What ``dest`` receives for one sequence: a plan for each source rank that has to do with it. ``layout`` is the
    whole model's, as the sources hold it."""
    plans = (reshard(Side(layout, source_degree, rank), dest) for rank in range(source_degree))
    return tuple(plan for plan in plans if plan.slices)


def plans_from(source: Side, layout: KvLayout, dest_degree: int) -> tuple[ReshardPlan, ...]:
    """What ``source`` sends for one sequence: a plan for each destination rank that it serves. ``layout`` is the whole
    model's, as the destinations hold it. Empty when the others of its replicas serve them all."""
    plans = (reshard(source, Side(layout, dest_degree, rank)) for rank in range(dest_degree))
    return tuple(plan for plan in plans if plan.slices)
