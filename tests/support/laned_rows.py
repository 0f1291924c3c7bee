"""The rows of a laned link: models, what each rank holds of them, a hand-off, and what must have landed."""

from __future__ import annotations

import torch

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV
from kv_transfer.transports.base import byte_view
from paceline.kvcache.layout import KvLayer, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.v1.handoff_pb2 import State
from tests.kv_transfer.layout.sharded import cut, fill, read
from tests.support.laned_link import LanedLink
from tests.support.thread_ranks import family_spec, ranks_spec

TOTAL = 33
DRAFT = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 3, 8)
LATENTS = (*[KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24)] * 3, KvLayer(LayerKind.MLA, LayerOwner.DRAFT, 1, 24))


def heads(count: int, width: int = 8) -> tuple[KvLayer, ...]:
    return (*[KvLayer(LayerKind.GQA, LayerOwner.TARGET, count, width)] * 3, DRAFT)


MODELS: dict[str, tuple[ModelSpec, tuple[KvLayer, ...]]] = {
    "8 heads": (ranks_spec(8), heads(8)),
    "2 heads": (ranks_spec(2), heads(2)),
    "latents": (family_spec("deepseek_v3"), LATENTS),
}


def share(rows: list[torch.Tensor], pool: KvPool, degree: int, rank: int) -> list[torch.Tensor]:
    """What a rank holds: its heads of the target, on rank 0 the drafter's layers."""
    target = [cut(full, degree, rank) for full in rows[:3]]
    return [*target, *rows[3:]] if rank == 0 else target


def plain_pools(link: LanedLink, end: int) -> list[KvPool]:
    node = link.nodes[end]
    return [link.lanes[end].own_pool, *node.theirs]


def fill_source(link: LanedLink, rows: list[torch.Tensor], degree: int) -> None:
    for rank, pool in enumerate(plain_pools(link, 0)):
        fill(pool, link.source_slots[: len(rows[0])], share(rows, pool, degree, rank))


def send(link: LanedLink, ticket: str, tokens: range, upto: int | None = None) -> None:
    """All of a hand-off; or, with ``upto``, that many of its rows and no State."""
    link.reserve(ticket, tokens)
    link.feeder.begin(ticket, tokens)
    last = tokens.stop if upto is None else upto
    for byte_class, layers in ((TARGET_KV, range(1)), (TARGET_KV, range(1, 3)), (DRAFT_KV, range(3, 4))):
        for start in range(tokens.start, last, 7):
            link.rows(ticket, byte_class, layers, range(start, min(start + 7, last)))
    if upto is None:
        link.feeder.state(ticket, State(first_token_id=5), None)


def check_landed(link: LanedLink, rows: list[torch.Tensor], degree: int, tokens: range) -> None:
    for rank, pool in enumerate(plain_pools(link, 1)):
        wanted = share(rows, pool, degree, rank)
        for got, full in zip(read(pool, link.landing.slots[tokens.start : tokens.stop]), wanted, strict=True):
            assert torch.equal(byte_view(got.contiguous()), byte_view(full[tokens.start : tokens.stop].contiguous()))
        before = read(pool, link.landing.slots[: tokens.start])
        assert not any(bool(part.any()) for part in before)  # rows that decode said it has are not written
