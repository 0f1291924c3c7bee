"""One link of a decode node, as the event loop that owns it sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.transports.rendezvous import LinkStore
from kv_transfer.transports.sentinel import Sentinel
from paceline.errors import PacelineError
from paceline.serving.loop import notify
from paceline.v1 import handoff_pb2


@dataclass(eq=False)
class Link:
    """One link. The event loop owns it; ``acks`` gets None at the end."""

    link_id: str
    peer: str
    deadline: float  # to be claimed, monotonic clock
    loop: asyncio.AbstractEventLoop
    multiple: int  # see `Transport`
    store: LinkStore = field(init=False)
    ranks: tuple[int, int] | None = None  # of both nodes, where these have lanes
    acks: asyncio.Queue[handoff_pb2.HandoffAck | None] = field(default_factory=asyncio.Queue)
    opening: asyncio.Future[None] | None = None  # once it is claimed
    problem: PacelineError | None = None  # to be told on the control stream
    receiver: HandoffReceiver | None = None  # the opening thread, when all is open but the answer to Hello
    sentinel: Sentinel | None = None  # the opening thread

    def end(self, problem: PacelineError) -> None:
        """The control stream cannot go on: whatever waits for it ends. From any thread."""
        self.problem = self.problem or problem
        self.store.close(str(problem))
        if self.receiver is not None:
            self.receiver.link_lost(str(problem))
        else:
            self.ack(None)

    def refuse(self, problem: PacelineError) -> None:
        """Tell the peer why; the pipe is cut a moment later, so that it hears that first."""
        self.problem = problem
        self.ack(None)

    def ack(self, ack: handoff_pb2.HandoffAck | None) -> None:
        """Queue an acknowledgement. Thread-safe; bounded by the tickets of the link."""
        notify(self.loop, self.acks.put_nowait, ack)
