"""All lanes of a link, as rank 0 of one side moves rows over them: its own, and through questions those of followers.

Rank 0 alone knows of hand-offs. It says which rows go into which buffer, and it goes on when every rank has answered:
rows are gathered while their ticket cannot end, a message is off when it is off on every lane, and rows have arrived
when they lie in the pool of every rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kv_transfer.lanes.ends import LaneEnds
from kv_transfer.lanes.options import LaneOptions
from kv_transfer.transports.base import NUM_BUFFERS, Pending, Transport, TransportError
from kv_transfer.transports.rendezvous import LinkStore
from kv_transfer.transports.side_stream import finish_queued
from paceline.errors import HandoffFailed
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.ranks.asker import Answer, Asker
from paceline.ranks.channel import Kind
from paceline.ranks.commands import LaneCommand, host_slots, link_fields
from paceline.ranks.leader import RANK_TIMEOUT_S, Followers
from paceline.ranks.pool import ShardedPool

_numbers = itertools.count(1)  # of the links of this process
NO_SLOTS = torch.empty(0, dtype=torch.int64)


def followers_of(pool: KvPool) -> Followers | None:
    """The other ranks of the node whose rank 0 has this pool."""
    return pool.followers if isinstance(pool, ShardedPool) else None


def degree_of(pool: KvPool) -> int:
    """Ranks of that node."""
    followers = followers_of(pool)
    return 1 if followers is None else followers.degree


class Lanes:
    """Made before the link's own pipe is opened, then `open`ed behind it, which blocks. Errors of a link are
    TransportError, those of a rank of this node NodeUnavailable; HandoffFailed is of one hand-off alone."""

    def __init__(self, options: LaneOptions, pool: KvPool, store: LinkStore) -> None:
        """pool: rank 0's, of the whole model. store: of the link."""
        self.options, self._store = options, store
        followers = followers_of(pool)
        self._followers = followers
        askers = [] if followers is None else followers.lanes
        self._askers = [asker for rank, asker in enumerate(askers, 1) if options.of_rank(rank)]
        self._ranks = [rank for rank in range(1, len(askers) + 1) if options.of_rank(rank)]
        side = options.lead.source if options.sends else options.lead.dest
        self.own_pool = pool.held_as_pool(side.local)
        # A follower's answer may be as late as its peers are, one after the other.
        lanes_of_a_rank = [len(options.of_rank(rank)) for rank in self._ranks]
        self._patience_s = RANK_TIMEOUT_S + options.timeout_s * max(lanes_of_a_rank, default=0)
        self._link = next(_numbers)
        self._target = side.layout.layer_range(LayerOwner.TARGET)
        self._ends: LaneEnds | None = None
        self._over = False
        self._opening = [self._open_at(rank, asker) for rank, asker in zip(self._ranks, self._askers, strict=True)]
        self._free = deque(range(NUM_BUFFERS))

    def open(self) -> None:
        """Open rank 0's ends, and wait for those of the others."""
        self._ends = LaneEnds(self.options, 0, self.own_pool, self._store)
        if self._over:
            self._ends.abort()
        self._wait(self._opening)

    def carry(self, layers: range) -> bool:
        """Rows of ``layers`` go over lanes too: those of the target."""
        return bool(layers) and layers.start in self._target

    def num_bytes(self, layers: range, count: int) -> int:
        """Bytes of ``count`` tokens on all lanes together."""
        wires = [plan.wire for plan in self.options.lanes]
        elems = sum(wire.layers[layer].row_elems * wire.dtype.itemsize for wire in wires for layer in layers)
        return count * elems

    def lead_bytes(self, layers: range, count: int) -> int:
        """Bytes of ``count`` tokens on the link's own pipe; 0 for layers that are none of the target."""
        wire = self.options.lead.wire
        inside = layers.start in self._target and layers.stop - 1 in self._target
        return count * sum(wire.layers[layer].row_elems for layer in layers) * wire.dtype.itemsize if inside else 0

    # -- at the source -----------------------------------------------------------------------------------------

    def take(self) -> int:
        """A buffer of every rank. There is one whenever a staging buffer is free."""
        return self._free.popleft()

    def give_back(self, number: int) -> None:
        """Nobody needs what is in a buffer any more."""
        self._free.append(number)

    def gather(self, number: int, layers: range, slots: Tensor) -> None:
        """Fill the buffers of every rank with the rows at ``slots`` [T], which all ranks have computed."""
        finish_queued(self.own_pool.device)
        with self._answered(self._ask(Kind.LANES_GATHER, number, layers, slots)):
            self._own.gather(number, layers, slots)
        if self._followers is not None:
            self._followers.finish()  # rows of ranks that were lost meanwhile are not to be used

    def send(self, number: int, layers: range, count: int) -> Pending:
        """Let the buffers of every rank leave; what is returned waits until they are off."""
        asked = self._ask(Kind.LANES_SEND, number, layers, count)
        return self._both(self._own.send(number, layers, count), asked)

    # -- at the destination ------------------------------------------------------------------------------------

    def receive(self, number: int, layers: range, count: int) -> Pending:
        """The next message of every lane may arrive in the buffers; what is returned waits until it has."""
        asked = self._ask(Kind.LANES_RECEIVE, number, layers, count)
        return self._both(self._own.receive(number, layers, count), asked)

    def scatter(self, number: int, layers: range, slots: Tensor, arrived: Pending) -> None:
        """Store what ``arrived``, of `receive`, waits for at ``slots`` [T] of every rank's pool; it lies there when
        this returns, and nothing is written any more when it raises. HandoffFailed when a checksum does not hold."""
        with self._answered(self._ask(Kind.LANES_SCATTER, number, layers, slots)):
            arrived()
            self._own.scatter(number, layers, slots)

    # -- end of the link ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Orderly end. Idempotent, from any thread; blocks for no peer."""
        self._end(LaneEnds.close)

    def abort(self) -> None:
        """End at once. Idempotent, from any thread; blocks for no peer."""
        self._end(LaneEnds.abort)

    # -- insides -----------------------------------------------------------------------------------------------

    @property
    def _own(self) -> LaneEnds:
        if self._ends is None:
            raise TransportError("the lanes are not open")
        return self._ends

    def _open_at(self, rank: int, asker: Asker) -> Answer:
        """Let a follower open its ends; what it and its peers tell each other passes here."""
        asker.listen(self._link, self._store.set)
        opening = asker.ask(Kind.LANES_OPEN, link_fields(self._link, self.options.text().encode()))

        def relay(key: str, value: bytes) -> None:
            asker.tell(Kind.LANES_KEY, link_fields(self._link, key.encode(), value))

        for plan in self.options.of_rank(rank):
            self._store.relay(f"{self.options.prefix(plan)}/", relay)
        return opening

    def _ask(self, kind: Kind, number: int, layers: range, rows: int | Tensor) -> list[Answer]:
        """rows: the tokens' slots where the pool is read or written, else how many they are."""
        if self._followers is None or not self._askers:
            return []
        slots = NO_SLOTS if isinstance(rows, int) else host_slots(rows)
        count = rows if isinstance(rows, int) else len(rows)
        fields = LaneCommand(self._link, number, layers, count, self._followers.done, slots).fields()
        return [asker.ask(kind, fields) for asker in self._askers]

    def _wait(self, asked: Sequence[Answer]) -> None:
        """Until every follower has answered. Raises what the first says that could not: TransportError, or
        HandoffFailed where all lanes go on."""
        answers = zip(self._ranks, self._askers, asked, strict=False)
        said = [(rank, *asker.wait(answer, self._patience_s)) for rank, asker, answer in answers]
        for kind, error in ((Kind.LANES_BROKEN, TransportError), (Kind.LANES_CORRUPT, HandoffFailed)):
            for rank, answered, problem in said:
                if answered is kind:
                    raise error(f"rank {rank}: {problem}")

    @contextmanager
    def _answered(self, asked: Sequence[Answer]) -> Iterator[None]:
        """Around what rank 0 does of a question to all: leaves when every follower has answered."""
        try:
            yield
        except BaseException as error:
            try:
                self._wait(asked)
            except HandoffFailed:
                raise error from None  # it may be of the link
            raise
        self._wait(asked)

    def _both(self, own: Pending, asked: Sequence[Answer]) -> Pending:
        def wait() -> None:
            with self._answered(asked):
                own()

        return wait

    def _end(self, how: Callable[[LaneEnds], None]) -> None:
        self._over = True
        for asker in self._askers:
            asker.end(self._link)
        if self._ends is not None:
            how(self._ends)


class LanedTransport(Transport):
    """The link's own pipe, whose end is that of its lanes."""

    def __init__(self, inner: Transport, lanes: Lanes) -> None:
        self._inner, self._lanes = inner, lanes

    def send(self, tensor: Tensor) -> None:
        """See Transport."""
        self._inner.send(tensor)

    def recv(self, tensor: Tensor) -> None:
        """See Transport."""
        self._inner.recv(tensor)

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return self._inner.start_send(tensor)

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return self._inner.start_recv(tensor)

    def close(self) -> None:
        """See Transport."""
        self._inner.close()
        self._lanes.close()

    def abort(self) -> None:
        """See Transport."""
        self._inner.abort()
        self._lanes.abort()

    def _send_message(self, data: Tensor) -> None:
        self._inner.send(data)

    def _recv_message(self, data: Tensor) -> None:
        self._inner.recv(data)
