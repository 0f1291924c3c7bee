"""What every rank of both sides must know of a link before it can open its lanes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from json import dumps, loads
from typing import Any

import torch

from kv_transfer.layout.reshard import ReshardPlan, Side, plans_from, plans_into, reshard
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner


@dataclass(frozen=True)
class LaneOptions:
    """Crosses to a follower as JSON. No key of a lane is in it.

    ``layers``: of the whole model, each as kind, owner, heads and width. ``dtypes``: of the rows at the source, at the
    destination, and of hidden rows where it is another. ``timeout_s``: of joining, and of one message. ``sealed``,
    ``checksums``: as of the link's own pipe.
    """

    link_id: str
    sends: bool
    source_degree: int
    dest_degree: int
    layers: tuple[tuple[str, str, int, int], ...]
    dtypes: tuple[str, str, str]
    transport: str
    host: str
    timeout_s: float
    sealed: bool
    checksums: bool

    @classmethod
    def of(
        cls, link_id: str, degrees: tuple[int, int], layouts: tuple[KvLayout, KvLayout], *, sends: bool, **wire: Any
    ) -> LaneOptions:
        """degrees, layouts: of the source and of the destination, whole. wire: transport, host, timeout_s, sealed,
        checksums."""
        source, dest = layouts
        return cls(
            link_id=link_id,
            sends=sends,
            source_degree=degrees[0],
            dest_degree=degrees[1],
            layers=tuple((layer.kind, layer.owner, layer.num_kv_heads, layer.head_dim) for layer in source.layers),
            dtypes=(_name(source.dtype), _name(dest.dtype), _name(source.hidden) if source.hidden else ""),
            **wire,
        )

    def text(self) -> str:
        """As it crosses."""
        return dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> LaneOptions:
        """Inverse of ``text``. Raises ValueError and TypeError for another text."""
        found = loads(text)
        layers = tuple(tuple(layer) for layer in found.pop("layers"))
        return cls(layers=layers, dtypes=tuple(found.pop("dtypes")), **found)

    @cached_property
    def lead(self) -> ReshardPlan:
        """What rank 0 sends to rank 0, on the link's own pipe."""
        return reshard(Side(self._layout(0), self.source_degree), Side(self._layout(1), self.dest_degree))

    @cached_property
    def lanes(self) -> tuple[ReshardPlan, ...]:
        """Every other pair, in the order in which both sides open them."""
        dests = (Side(self._layout(1), self.dest_degree, rank) for rank in range(self.dest_degree))
        plans = (plan for dest in dests for plan in plans_into(self._layout(0), self.source_degree, dest))
        return tuple(sorted((plan for plan in plans if _pair(plan) != (0, 0)), key=_pair))

    def of_rank(self, rank: int) -> tuple[ReshardPlan, ...]:
        """The lanes that end at a rank of this side, in that order."""
        if self.sends:
            plans = plans_from(Side(self._layout(0), self.source_degree, rank), self._layout(1), self.dest_degree)
        else:
            plans = plans_into(self._layout(0), self.source_degree, Side(self._layout(1), self.dest_degree, rank))
        return tuple(sorted((plan for plan in plans if _pair(plan) != (0, 0)), key=_pair))

    def prefix(self, plan: ReshardPlan) -> str:
        """The link id of one lane."""
        return f"{self.link_id}/{plan.source.rank}-{plan.dest.rank}"

    def _layout(self, end: int) -> KvLayout:
        layers = (KvLayer(LayerKind(kind), LayerOwner(owner), *sizes) for kind, owner, *sizes in self.layers)
        hidden = getattr(torch, self.dtypes[2]) if self.dtypes[2] else None
        return KvLayout(tuple(layers), getattr(torch, self.dtypes[end]), hidden)


def _pair(plan: ReshardPlan) -> tuple[int, int]:
    return plan.source.rank, plan.dest.rank


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
