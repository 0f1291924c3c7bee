"""A link between two nodes of several ranks with real lanes over gloo; the ranks' lanes are served by threads."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kv_transfer.handoff.block import ByteClass, RowBlock
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.state import Handoff
from kv_transfer.lanes.arrivals import Arrivals, LaneTarget
from kv_transfer.lanes.follower import LaneServer
from kv_transfer.lanes.leader import Lanes
from kv_transfer.lanes.options import LaneOptions
from kv_transfer.lanes.pairing import open_with
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import Rank, Transport
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import store_pair
from paceline.kvcache.layout import KvLayer, KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.config import ModelSpec
from paceline.ranks.channel import Channel
from paceline.ranks.leader import Followers
from paceline.ranks.pool import ShardedPool, held_layout
from paceline.ranks.shard import Shard
from paceline.ranks.sockets import SocketGroup
from paceline.v1.handoff_pb2 import HandoffAck, State
from prefill_node.feeder import RowFeeder

PAGES, TIMEOUT_S, HIDDEN = 40, 5.0, 8
_ids = itertools.count()
Ran = Callable[[int], None]


class Ranks:
    """One node: the pool of rank 0, which knows of the others, and those of the followers. ``ran(number)``: see
    `kv_transfer.lanes.follower.LaneServer`'s ``wait_for``."""

    def __init__(self, spec: ModelSpec, layout: KvLayout, degree: int, page_size: int, ran: Ran) -> None:
        pairs = [[tuple(map(Channel, socket.socketpair())) for _ in range(1, degree)] for _ in range(2)]
        commands, lanes = ([ours for ours, _ in kind] for kind in pairs)
        self.followers = Followers(commands, [], lanes, SocketGroup(0, degree, [], TIMEOUT_S))
        cpu = torch.device("cpu")
        shards = [Shard(spec, degree, rank) for rank in range(degree)]
        self.broken: list[Exception] = []
        self.theirs = [KvPool(held_layout(layout, shard), PAGES, page_size) for shard in shards[1:]]
        self.pool: KvPool = KvPool(layout, PAGES, page_size)
        if degree > 1:
            self.pool = ShardedPool(layout, PAGES, page_size, cpu, shards[0], self.followers)
        self.unused = [their for kind in pairs for _, their in kind]
        self.ends = [their for _, their in pairs[1]]
        self.threads = [
            threading.Thread(target=LaneServer(end, rank, pool, ran, self.broken.append).run, daemon=True)
            for rank, (end, pool) in enumerate(zip(self.ends, self.theirs, strict=True), 1)
        ]
        for thread in self.threads:
            thread.start()

    @property
    def pools(self) -> list[KvPool]:
        """Those of all ranks, rank 0 first."""
        return [self.pool, *self.theirs]

    def close(self) -> None:
        self.followers.stop()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        self.followers.close()
        for end in self.unused:
            end.close()


@dataclass
class Landing:
    """The `HandoffSink` of the link."""

    target: LaneTarget
    handoffs: dict[str, Handoff]
    slots: torch.Tensor
    outcomes: dict[str, str] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def lookup(self, ticket: str) -> Handoff | None:
        return self.handoffs.get(ticket)

    def write_kv(self, ticket: str, block: RowBlock, data: torch.Tensor) -> None:
        self.target.scatter(block.layers, self.slots[block.tokens.start : block.tokens.stop], data)

    def ready(self, ticket: str, state: State, hidden: torch.Tensor) -> None:
        self._over(ticket, "ready")

    def failed(self, ticket: str, reason: str) -> None:
        self._over(ticket, reason)

    def outcome(self, ticket: str) -> str:
        """Waits for it."""
        with self.changed:
            assert self.changed.wait_for(lambda: ticket in self.outcomes, 20), f"{ticket} has no end"
            return self.outcomes[ticket]

    def _over(self, ticket: str, outcome: str) -> None:
        with self.changed:
            self.outcomes[ticket] = outcome
            self.changed.notify_all()


@dataclass
class LanedLink:
    """Both nodes and the link between them."""

    nodes: tuple[Ranks, Ranks]
    lanes: tuple[Lanes, Lanes]
    sender: HandoffSender
    receiver: HandoffReceiver
    feeder: RowFeeder
    landing: Landing
    ended: dict[str, HandoffAck | str]
    source_slots: torch.Tensor

    def reserve(self, ticket: str, tokens: range) -> None:
        expected = ExpectedRows(self.nodes[1].pool.layout, tokens, HIDDEN, False)
        self.landing.handoffs[ticket] = Handoff(
            ticket, time.monotonic, expected, reserve_deadline_s=60, handoff_deadline_s=60
        )

    def wait_ended(self, ticket: str) -> None:
        """Until the source has heard of the end."""
        end = time.monotonic() + 15
        while ticket not in self.ended:
            assert time.monotonic() < end, f"the source does not hear of {ticket}"
            time.sleep(0.005)

    def rows(self, ticket: str, byte_class: ByteClass, layers: range, tokens: range) -> None:
        slots = self.source_slots[tokens.start : tokens.stop]
        self.feeder.rows(ticket, RowBlock(byte_class, layers, tokens), slots)


# Long, because it makes both ends of a link, and its options are many.
@contextmanager
def laned_link(
    spec: ModelSpec,
    layers: tuple[KvLayer, ...],
    degrees: tuple[int, int],
    *,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
    page_sizes: tuple[int, int] = (16, 7),
    sealed: bool = False,
    checksums: bool = False,
    ran: tuple[Ran, Ran] | None = None,
    timeout_s: float = TIMEOUT_S,
    into: Ranks | None = None,
) -> Iterator[LanedLink]:
    """An open link. layers: of the whole model. into: the decode node of another link, which serves this one too."""
    layouts = KvLayout(layers, dtypes[0]), KvLayout(layers, dtypes[1])
    made_here = [Ranks(spec, layouts[i], degrees[i], page_sizes[i], (ran or (_at_once, _at_once))[i]) for i in (0, 1)
                 if i == 0 or into is None]  # fmt: skip
    nodes = (*made_here, into) if into else tuple(made_here)
    stores, link_id = store_pair(timeout_s), f"laned/{next(_ids)}"

    def open_end(end: int) -> tuple[Lanes, Transport]:
        options = LaneOptions.of(
            link_id, degrees, layouts, sends=end == 0, transport="gloo", host="127.0.0.1", timeout_s=timeout_s,
            sealed=sealed, checksums=checksums,
        )  # fmt: skip
        lanes = Lanes(options, nodes[end].pool, stores[end])

        def own() -> Transport:
            rank: Rank = 0 if end == 0 else 1
            return open_transport("gloo", stores[end], link_id, rank, "127.0.0.1", timeout_s, sealed=sealed)

        return lanes, open_with(lanes, own)

    with ThreadPoolExecutor(2) as pool:
        (mine, sends), (theirs, receives) = pool.map(open_end, (0, 1))
    ended: dict[str, HandoffAck | str] = {}
    arrivals = Arrivals(theirs)
    landing = Landing(LaneTarget(arrivals), {}, _slots(page_sizes[1], 5))
    receiver = HandoffReceiver(receives, landing, lambda ack: sender.acknowledge(ack), arrivals=arrivals)
    sender = HandoffSender(sends, receiver.feed, on_ended=ended.__setitem__, on_link_lost=receiver.link_lost)
    source = RowSource(mine.own_pool, mine.options.lead)
    feeder = RowFeeder(sender, source, torch.device("cpu"), lambda ticket, why: ended.update({ticket: why}), mine)
    made = LanedLink(
        (nodes[0], nodes[1]), (mine, theirs), sender, receiver, feeder, landing, ended, _slots(page_sizes[0], 9)
    )
    try:
        yield made
    finally:
        sender.close(10)
        feeder.close(10)
        receiver.close(10)
        for node in made_here:
            node.close()


def _slots(page_size: int, seed: int) -> torch.Tensor:
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))
    return (pages[:, None] * page_size + torch.arange(page_size)).view(-1)


def _at_once(number: int) -> None:
    return
