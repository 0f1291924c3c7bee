"""Pools of sharded sides, and both sides of a hand-off with one link for each pair of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV, RowBlock
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.state import Handoff, HandoffState
from kv_transfer.layout.parts import PartJoin, part_ticket
from kv_transfer.layout.reshard import ReshardPlan, Side, plans_into
from kv_transfer.layout.rows import RowSource, RowTarget
from kv_transfer.transports.base import Transport
from paceline.kvcache.layout import KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.v1.handoff_pb2 import HandoffAck, HandoffMessage, State
from tests.support.pool_rows import write_rows

HIDDEN_SIZE = 12
OWNERS = ((TARGET_KV, LayerOwner.TARGET), (DRAFT_KV, LayerOwner.DRAFT))
PIECE_TOKENS = 5  # of one Chunk


def random_rows(layout: KvLayout, num_tokens: int, seed: int) -> list[Tensor]:
    """A sequence's KV, whole: of each layer [num_tokens, K and V or latent, heads, width] of the layout's dtype."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for layer in layout.layers:
        planes, heads = (1, 1) if layer.kind is LayerKind.MLA else (2, layer.num_kv_heads)
        rows.append(torch.randn(num_tokens, planes, heads, layer.head_dim, generator=generator).to(layout.dtype))
    return rows


def cut(full: Tensor, degree: int, rank: int) -> Tensor:
    """A rank's share of a layer, the plain way: repeat heads until there is one for each rank, then deal."""
    copies = max(1, degree // full.shape[2])
    return full.repeat_interleave(copies, dim=2).chunk(degree, dim=2)[rank]


def scattered_slots(num_tokens: int, page_size: int, num_pages: int, seed: int) -> Tensor:
    """Slots of consecutive positions in pages in no order, as a page table gives them: int32 [num_tokens]."""
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    slots = (pages[:, None] * page_size + torch.arange(page_size)).view(-1)[:num_tokens]
    assert len(slots) == num_tokens
    return slots.int()


def make_pool(side: Side, num_tokens: int, page_size: int) -> KvPool:
    """A rank's pool, with room to spare, every element a value that no row has."""
    pool = KvPool(side.local, num_tokens // page_size + 3, page_size)
    for data in pool.data:
        data.fill_(77.0)
    return pool


def fill(pool: KvPool, slots: Tensor, rows: Sequence[Tensor]) -> None:
    """Store a rank's share of rows, [tokens, planes, heads, width] by layer."""
    for index, tensor in enumerate(rows):
        if tensor.shape[1] == 1:
            write_rows(pool, index, slots, tensor[:, 0, 0])
        else:
            write_rows(pool, index, slots, tensor[:, 0], tensor[:, 1])


def read(pool: KvPool, slots: Tensor) -> list[Tensor]:
    """Inverse of `fill`."""
    rows = []
    for index, layer in enumerate(pool.layout.layers):
        if layer.kind is LayerKind.MLA:
            rows.append(pool.read_latent(index, slots)[:, None, None])
        else:
            rows.append(torch.stack(pool.read(index, slots), dim=1))
    return rows


@dataclass
class Rank:
    """One rank of either side: its pool, and the end of its hand-off."""

    side: Side
    pool: KvPool
    slots: Tensor
    outcome: list[str | None] = field(default_factory=list)  # of the join
    over: threading.Event = field(default_factory=threading.Event)

    def done(self, failure: str | None) -> None:
        self.outcome.append(failure)
        self.over.set()


class Landing:
    """The `HandoffSink` of one decode rank, for one hand-off."""

    def __init__(self, rank: Rank, plans: Sequence[ReshardPlan], ticket: str, first: int, count: int) -> None:
        self.rank = rank
        self.hidden: list[Tensor] = []
        self.receivers: dict[str, HandoffReceiver] = {}
        self.targets = {part_ticket(ticket, plan): RowTarget(rank.pool, plan) for plan in plans}
        self.handoffs = {}
        for part, target in self.targets.items():
            tokens, name = range(first, first + count), target.plan.name
            expected = ExpectedRows(target.plan.wire, tokens, HIDDEN_SIZE, False, name)
            self.handoffs[part] = Handoff(part, time.monotonic, expected, reserve_deadline_s=60, handoff_deadline_s=60)
        self.join = PartJoin(self.targets, self.give_up, rank.done)

    def give_up(self, part: str, reason: str) -> None:
        if self.handoffs[part].fail_reserved(reason):
            self.join.failed(part, reason)
        else:
            self.receivers[part].fail(part, reason)

    @property
    def draft_complete(self) -> bool:
        return all(handoff.draft_complete for handoff in self.handoffs.values())

    def lookup(self, ticket: str) -> Handoff | None:
        return self.handoffs.get(ticket)

    def write_kv(self, ticket: str, block: RowBlock, data: Tensor) -> None:
        slots = self.rank.slots[block.tokens.start : block.tokens.stop]
        self.targets[ticket].scatter(block.layers, slots, data)

    def ready(self, ticket: str, state: State, hidden: Tensor) -> None:
        if len(hidden):
            self.hidden.append(hidden)
        self.join.ready(ticket)

    def failed(self, ticket: str, reason: str) -> None:
        assert self.handoffs[ticket].status is HandoffState.FAILED
        self.join.failed(ticket, reason)


class Sharded:
    """A hand-off of rows ``first`` to the end, from prefill ranks to decode ranks, one link for each plan.

    ``dest_layout``: the decode side's, when its dtype differs. ``open_link``: makes both ends of a transport.
    """

    def __init__(
        self,
        rows: Sequence[Tensor],
        layout: KvLayout,
        degrees: tuple[int, int],
        page_sizes: tuple[int, int],
        open_link: Callable[[], tuple[Transport, Transport]],
        *,
        first: int = 0,
        dest_layout: KvLayout | None = None,
        order: Callable[[int], int] = lambda place: place,
    ) -> None:
        self.first, self.total = first, rows[0].shape[0]
        self.layouts = layout, dest_layout or layout
        self.prefill, self.decode = (
            [self._rank(Side(self.layouts[i], degrees[i], rank), page_sizes[i]) for rank in range(degrees[i])]
            for i in range(2)
        )
        for rank in self.prefill:
            fill(rank.pool, rank.slots, [cut(full, degrees[0], rank.side.rank) for full in rows])
        # The places that ranks of the prefill side sit at decide only the order in which links are made and used.
        self.prefill = [self.prefill[order(place)] for place in range(degrees[0])]
        self.hidden = torch.randn(1, HIDDEN_SIZE, generator=torch.Generator().manual_seed(9)).to(layout.dtype)
        self.landings = [self._landing(rank, degrees[0]) for rank in self.decode]
        self.messages: dict[str, list[HandoffMessage]] = {}
        self.sources: dict[str, RowSource] = {}
        self.senders: dict[str, HandoffSender] = {}
        self.joins: list[PartJoin] = []
        for place, rank in enumerate(self.prefill):
            self._connect(place, rank, open_link)

    def _rank(self, side: Side, page_size: int) -> Rank:
        pool = make_pool(side, self.total, page_size)
        return Rank(side, pool, scattered_slots(self.total, page_size, pool.num_pages, 31 * page_size + side.rank))

    def _landing(self, rank: Rank, degree: int) -> Landing:
        plans = plans_into(self.layouts[0], degree, rank.side)
        return Landing(rank, plans, "t", self.first, self.total - self.first)

    def _connect(self, place: int, rank: Rank, open_link: Callable[[], tuple[Transport, Transport]]) -> None:
        mine = {
            part: (landing, target.plan)
            for landing in self.landings
            for part, target in landing.targets.items()
            if target.plan.source == rank.side
        }
        if not mine:
            rank.done(None)  # its replicas serve everybody
            return
        join = PartJoin(mine, lambda part, reason: self.senders[part].abort(part, reason), rank.done)
        for part, (landing, plan) in mine.items():
            self._link(part, landing, RowSource(rank.pool, plan), join, open_link())
        self.joins.append(join)

    def _link(
        self, part: str, landing: Landing, source: RowSource, join: PartJoin, ends: tuple[Transport, Transport]
    ) -> None:
        self.messages[part], self.sources[part] = [], source

        def on_ended(ticket: str, end: HandoffAck | str) -> None:
            if isinstance(end, str):
                join.failed(ticket, end)
            elif end.WhichOneof("body") == "ready":
                join.ready(ticket)
            else:
                join.failed(ticket, end.failed.reason)

        def post(message: HandoffMessage) -> None:
            self.messages[part].append(message)
            receiver.feed(message)

        sender = HandoffSender(ends[0], post, on_ended=on_ended, on_link_lost=lambda reason: None)
        receiver = HandoffReceiver(ends[1], landing, sender.acknowledge, link_id=part)
        self.senders[part], landing.receivers[part] = sender, receiver

    def send(self, part: str, *, draft: bool = True, upto: int | None = None, name: str | None = None) -> None:
        """All of one part; or, with ``upto``, that many of its rows and no State."""
        sender, source = self.senders[part], self.sources[part]
        rank = next(rank for rank in self.prefill if rank.side == source.plan.source)
        sender.begin(part, range(self.first, self.total), source.plan.name if name is None else name)
        for byte_class, owner in OWNERS[: 2 if draft else 1]:
            layers = self.layouts[0].layer_range(owner)
            for group in (layers[:1], layers[1:]):  # layer groups, as they finish
                if source.token_bytes(group) == 0:
                    continue
                for start in range(self.first, upto or self.total, PIECE_TOKENS):
                    end = min(start + PIECE_TOKENS, upto or self.total)
                    data = source.gather(group, rank.slots[start:end])
                    assert data.nbytes == (end - start) * source.token_bytes(group)
                    sender.chunk(part, RowBlock(byte_class, group, range(start, end)), data)
        if upto is None:
            sender.state(part, State(first_token_id=5), self.hidden.to(source.dtype) if source.plan.lead else None)

    def wait_begun(self, part: str) -> None:
        """Wait until decode knows that the part is under way; an Abort before that leaves the reservation alone."""
        handoff = next(landing.handoffs[part] for landing in self.landings if part in landing.handoffs)
        end = time.monotonic() + 10
        while handoff.status is HandoffState.RESERVED:
            assert time.monotonic() < end, f"{part} did not begin"
            time.sleep(0.002)

    def finish(self) -> None:
        """Wait until every rank of both sides has its outcome."""
        for rank in (*self.prefill, *self.decode):
            assert rank.over.wait(10), f"rank {rank.side.rank} of {rank.side.degree} has no outcome"
            assert len(rank.outcome) == 1

    def close(self) -> None:
        for part, sender in self.senders.items():
            assert sender.close(5)
            landing = next(landing for landing in self.landings if part in landing.receivers)
            assert landing.receivers[part].close(5)
