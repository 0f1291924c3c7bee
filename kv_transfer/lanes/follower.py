"""A follower's lanes: it does with them what rank 0 says, link by link, and answers each command once.

One thread serves the channel and never waits for a peer: it gathers, and starts sends and receives, in the order of the
commands. Each link has a thread that waits: for peers to open their ends, for messages to leave, for messages to come,
which it then scatters. So a link that stalls holds up no other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from kv_transfer.lanes.ends import LaneEnds
from kv_transfer.lanes.options import LaneOptions
from kv_transfer.transports.base import TransportError
from kv_transfer.transports.rendezvous import LinkStore
from paceline.errors import HandoffFailed, NodeUnavailable, PacelineError
from paceline.kvcache.pool import KvPool
from paceline.ranks.channel import Array, Channel, Closed, Frame, Kind
from paceline.ranks.commands import MAX_ERROR_BYTES, LaneCommand, link_fields, read_link, text_fields

log = logging.getLogger(__name__)

END_TIMEOUT_S = 2.0

Work = tuple[int, Callable[[], None]]  # the number of a command, and what is left of it to do


class LaneServer:
    """Serves one follower's channel; `paceline.ranks.follower` finds it by its name.

    ``wait_for(number)``: until that command of the model has run here. ``broken``: told an error that is none of a
    link's.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        pool: KvPool,
        wait_for: Callable[[int], None],
        broken: Callable[[Exception], None],
    ) -> None:
        self._channel, self._rank, self._pool = channel, rank, pool
        self._wait_for, self._broken = wait_for, broken
        self._links: dict[int, _Link] = {}
        self._sending = threading.Lock()

    def run(self) -> None:
        """Serve until the channel has ended, then end every link."""
        try:
            while True:
                self._take(self._channel.receive(None))
        except Closed:
            return
        except Exception as error:
            self._broken(error)
        finally:
            for link in self._links.values():
                link.end()
            for link in self._links.values():
                link.join()

    def _take(self, frame: Frame) -> None:
        if frame.kind is Kind.LANES_OPEN:
            number, (text,) = read_link(frame, 1)
            options = LaneOptions.read(text.decode())
            store = LinkStore(lambda key, value: self._tell(number, key, value), options.timeout_s)
            link = self._links[number] = _Link(store, self._answer, self._broken)
            link.do(frame.number, lambda: link.open(options, self._rank, self._pool))
        elif frame.kind is Kind.LANES_KEY:
            number, (key, value) = read_link(frame, 2)
            if (found := self._links.get(number)) is not None:
                found.store.receive(key.decode(), value)
        elif frame.kind is Kind.LANES_END:
            number, _ = read_link(frame, 0)
            if (found := self._links.pop(number, None)) is not None:
                found.end()
        else:
            self._move(frame)

    def _move(self, frame: Frame) -> None:
        command = LaneCommand.read(frame)
        link = self._links.get(command.link)
        ends = None if link is None else link.ends
        if link is None or ends is None:
            self._answer(frame.number, Kind.LANES_BROKEN, "the link has ended")
            return
        if frame.kind is Kind.LANES_GATHER:
            self._wait_for(command.after)
            ends.gather(command.number, command.layers, command.slots)
            self._answer(frame.number, Kind.LANES_DONE)
            return
        try:
            link.do(frame.number, self._started(frame.kind, command, ends))
        except TransportError as error:
            self._answer(frame.number, Kind.LANES_BROKEN, str(error))

    def _started(self, kind: Kind, command: LaneCommand, ends: LaneEnds) -> Callable[[], None]:
        """Begin what a command says; returns what may have to wait. TransportError: the link broke."""
        number, layers = command.number, command.layers
        match kind:
            case Kind.LANES_SEND:
                return ends.send(number, layers, command.count)
            case Kind.LANES_RECEIVE:
                return ends.receive(number, layers, command.count)
            case Kind.LANES_SCATTER:
                return lambda: self._scatter(ends, command)
        raise ValueError(f"{kind.name} is no command for lanes")

    def _scatter(self, ends: LaneEnds, command: LaneCommand) -> None:
        self._wait_for(command.after)
        ends.scatter(command.number, command.layers, command.slots)

    def _answer(self, number: int, kind: Kind, problem: str = "") -> None:
        self._send(kind, number, text_fields(problem[:MAX_ERROR_BYTES]))

    def _tell(self, link: int, key: str, value: bytes) -> None:
        self._send(Kind.LANES_KEY, 0, link_fields(link, key.encode(), value))

    def _send(self, kind: Kind, number: int, fields: list[Array]) -> None:
        with self._sending, suppress(NodeUnavailable):  # rank 0 is gone: the thread that serves hears it too
            self._channel.send(kind, number, fields)


class _Link:
    """One link's lanes and the thread that waits for them. ``answer(number, kind, problem)``: ends a command."""

    def __init__(
        self, store: LinkStore, answer: Callable[[int, Kind, str], None], broken: Callable[[Exception], None]
    ) -> None:
        self.store = store
        self.ends: LaneEnds | None = None  # once all are open
        self._answer, self._broken = answer, broken
        self._ended = False
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()  # bounded: rank 0 has NUM_BUFFERS buffers
        self._thread = threading.Thread(target=self._run, name="link-lanes", daemon=True)
        self._thread.start()

    def open(self, options: LaneOptions, rank: int, pool: KvPool) -> None:
        """Open this rank's ends; blocks until the peers open theirs."""
        self.ends = LaneEnds(options, rank, pool, self.store)
        if self._ended:
            self.ends.abort()

    def do(self, number: int, work: Callable[[], None]) -> None:
        """Run the rest of a command on the link's thread, and answer it."""
        self._queue.put((number, work))

    def end(self) -> None:
        """End the lanes, whatever they do. Idempotent."""
        self._ended = True
        self.store.close("the link has ended")
        if self.ends is not None:
            self.ends.abort()
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread, which a message in its midst may hold for longer."""
        self._thread.join(END_TIMEOUT_S)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            number, rest = work
            said, problem = Kind.LANES_DONE, ""
            try:
                rest()
            except HandoffFailed as error:
                said, problem = Kind.LANES_CORRUPT, str(error)
            except PacelineError as error:
                said, problem = Kind.LANES_BROKEN, str(error) or repr(error)
            except Exception as error:
                log.exception("lanes cannot be served")
                self._broken(error)
                return
            self._answer(number, said, problem)
