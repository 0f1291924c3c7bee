"""The parts of a link in a `World`: what a decode caller hears, where rows land, and the link itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from decode_node.sink import ReservedPages
from decode_node.stream import EventQueue
from kv_transfer.handoff.block import RowBlock
from kv_transfer.handoff.cut import message_sizes
from kv_transfer.handoff.state import HandoffState
from kv_transfer.layout.reshard import ReshardPlan, Side, reshard
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import TransportError
from kv_transfer.transports.loopback import loopback_pair
from paceline.kvcache.allocator import PageRef, StalePage
from paceline.kvcache.pool import KvPool
from paceline.v1.handoff_pb2 import HandoffAck, HandoffMessage, State
from tests.support.handoff_stepped import Interrupted, SteppedFeeder, SteppedReceiver, SteppedSender, no_threads

if TYPE_CHECKING:
    from tests.support.handoff_world import World


class ListEvents(EventQueue):
    """Keeps what the engine said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    @property
    def full(self) -> bool:
        return False

    def push(self, event: Any) -> None:
        self.said.append(event)


class WatchedSink(ReservedPages):
    """The real sink; counts what it is told, and notices a write to pages that are somebody else's."""

    world: World

    def write_kv(self, ticket: str, block: RowBlock, data: torch.Tensor) -> None:
        self.world.between()
        try:
            super().write_kv(ticket, block, data)
        except StalePage as stale:
            self.world.faults.append(f"{ticket}: a row of a released page would have been written: {stale}")
            raise

    def ready(self, ticket: str, state: State, hidden: torch.Tensor) -> None:
        self.world.told_decode[ticket] += 1
        began = self.world.handoffs[ticket].link_id
        if any(ticket in link.feeder.lost_target for link in self.world.links if link.link_id == began):
            self.world.faults.append(f"{ticket}: ready though rows were left out")
        super().ready(ticket, state, hidden)

    def failed(self, ticket: str, reason: str) -> None:
        self.world.told_decode[ticket] += 1
        super().failed(ticket, reason)


class WatchedSource(RowSource):
    """The real source; something else happens just before the rows are read."""

    def __init__(self, pool: KvPool, plan: ReshardPlan, before: Callable[[], None]) -> None:
        super().__init__(pool, plan)
        self._before = before

    def gather(self, layers: range, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self._before()
        return super().gather(layers, slots, out)


class FuzzLink:
    """Both ends of a link; the jobs' `Carrier`."""

    def __init__(self, world: World, link_id: str) -> None:
        self.world, self.link_id = world, link_id
        self.to_decode: deque[HandoffMessage] = deque()
        self.to_prefill: deque[HandoffAck] = deque()
        self.refs: dict[str, tuple[PageRef, ...]] = {}  # of the source, by ticket, from begin to the last word
        self.served: set[str] = set()  # tickets that an attempt brought here, begun or about to
        self.foreign: set[str] = set()  # tickets that it names and never serves
        self.gone = False  # for the decode node
        send_end, recv_end = loopback_pair(max_messages=1 << 16)
        self._pipe = recv_end._pipe
        layout = world.prefill.kv.layout
        with no_threads():
            self.receiver = SteppedReceiver(
                Interrupted(recv_end, world.between),
                world.sink,
                self.to_prefill.append,
                link_id=link_id,
                on_link_lost=self._gone,
            )
            self.sender = SteppedSender(
                Interrupted(send_end, world.between),
                self.to_decode.append,
                on_ended=self._ended,
                on_link_lost=lambda reason: None,
            )
            source = WatchedSource(world.prefill.kv, reshard(Side(layout), Side(layout)), self._gathers)
            refused = lambda ticket, reason: world.ended(self, ticket, reason)  # noqa: E731
            self.feeder = SteppedFeeder(self.sender, source, torch.device("cpu"), refused)
        self.rows, self.hidden_rows, self.state = self.feeder.rows, self.feeder.hidden_rows, self.feeder.state
        self.abort, self.bytes_sent, self.lost = self.feeder.abort, self.sender.bytes_sent, self.sender.link_lost
        self.sending_s, self.groups = self.sender.sending_s, self.feeder.groups

    def begin(self, ticket: str, tokens: range, grant: bytes = b"") -> None:
        seq = self.world.p_engine._jobs[ticket].seq
        assert seq is not None
        self.refs[ticket] = tuple(seq.table.pages)
        self.feeder.lost_target.discard(ticket)
        self.world.begun[ticket] += 1
        self.feeder.begin(ticket, tokens, grant)

    def _gathers(self) -> None:
        """The midst of a gather: whatever happens there, the pages stay until it is over."""
        self.world.between()
        ticket = self.feeder.gathering
        refs = self.refs.get(ticket)
        if refs is None or not all(self.world.prefill.allocator._current(ref) for ref in refs):
            self.world.faults.append(f"{ticket}: its rows are gathered after its end")

    def _gone(self, reason: str) -> None:
        self.gone = True

    def _ended(self, ticket: str, ack: HandoffAck | str) -> None:
        """Only when the receiver is done with the ticket, or the link is dead, may the source forget it."""
        if isinstance(ack, str):
            self.world.ended(self, ticket, ack)
            return
        ready, handoff = ack.HasField("ready"), self.world.handoffs.get(ticket)
        if self.receiver.alive and self.receiver.in_flight(ticket):
            self.world.faults.append(f"{ticket}: ended at the sender while the receiver waits for it")
        if ready and (handoff is None or handoff.status not in (HandoffState.READY, HandoffState.RELEASED)):
            self.world.faults.append(f"{ticket}: told ready where it is {handoff and handoff.status}")
        self.world.ended(self, ticket, None if ready else ack.failed.reason or "refused")

    def bytes_are_there(self) -> bool:
        """The receiver would not wait for those of its next message."""
        message = self.receiver.next_message
        if message is None or not (message.chunk.num_bytes or message.state.num_bytes) or not self.receiver.alive:
            return True
        return not self.sender.busy and len(self._pipe.messages) >= len(message_sizes(message))

    def deliver(self) -> bool:
        """One control message reaches the decode node."""
        if not self.to_decode:
            return False
        message = self.to_decode.popleft()
        try:
            self.receiver.feed(message)
        except TransportError:
            self.to_decode.clear()
        return True

    def ack(self) -> bool:
        """One acknowledgement reaches the prefill node."""
        if not self.to_prefill:
            return False
        self.sender.acknowledge(self.to_prefill.popleft())
        return True
