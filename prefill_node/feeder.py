"""Takes rows off the pool and gives them to a link's sender, on one thread per link.

Queue: produced by the engine thread (descriptors: which slots of which layers), consumed in order by the feeder
thread. Rows are gathered only when their turn comes and a staging buffer is free, so however slow a link is, no more
than these buffers is ever copied; until then the rows wait in the pages that the sequence holds. A ticket does not end
while its rows are gathered, and once it has ended they are not. The number of descriptors is bounded by the chunks of
the prompts that hold pages.

On a GPU a descriptor carries a mark of the computation that it follows; its rows are gathered behind that mark on a
stream beside the computation.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kv_transfer.handoff.block import HIDDEN, NO_LAYERS, RowBlock
from kv_transfer.handoff.cut import chunks, messages
from kv_transfer.handoff.outbox import Beside, Outgoing
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.staging import StagingRing
from kv_transfer.lanes.leader import Lanes
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import MESSAGE_BYTES, TransportError
from kv_transfer.transports.side_stream import SideStream
from paceline.errors import HandoffFailed, PacelineError
from paceline.v1 import handoff_pb2
from prefill_node.groups import layer_groups

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """A staging buffer of the rows' dtype, the number of those that lanes have of the same rows, and how to give them
    back."""

    data: torch.Tensor
    number: int | None
    done: Callable[[], None]


class RowFeeder:
    """One link's feeder. No method blocks, but ``close``.

    ``device`` is where the transport reads from. ``refused(ticket, reason)`` tells that a hand-off could not even
    begin, so that the sender will never report it; it is called on the feeder thread or on the caller's. ``lanes``:
    over which ranks send to ranks what ``source`` does not.
    """

    def __init__(
        self,
        sender: HandoffSender,
        source: RowSource,
        device: torch.device,
        refused: Callable[[str, str], None],
        lanes: Lanes | None = None,
    ) -> None:
        self._sender = sender
        self._lanes = lanes
        self._source = source
        self._device = device
        self._refused = refused
        pinned = source.device.type == "cuda" and device.type == "cpu"
        self._staging = StagingRing(device, pinned=pinned, num_bytes=MESSAGE_BYTES * sender.multiple)
        self._side = SideStream(source.device)
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._given_up: set[str] = set()  # tickets whose descriptors are skipped
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="handoff-feeder", daemon=True)
        self._thread.start()

    def groups(self, layers: range, num_tokens: int) -> tuple[range, ...]:
        """The layers whose rows of a chunk are to be given to `rows` together, as each group is computed."""
        sizes = [num_tokens * self._source.token_bytes(range(layer, layer + 1)) for layer in layers]
        return layer_groups(sizes, layers.start, self._sender.multiple)

    def begin(self, ticket: str, tokens: range, grant: bytes = b"") -> None:
        """Open the hand-off of the rows of ``tokens``. grant: the router's word that this node may."""

        def begin() -> None:
            try:
                self._sender.begin(ticket, tokens, self._source.plan.name, grant)
            except PacelineError as error:
                self._refused(ticket, str(error))

        if not self._put(ticket, begin):
            self._refused(ticket, "the link is closed")

    def rows(self, ticket: str, block: RowBlock, slots: torch.Tensor) -> None:
        """Send the rows of ``block`` that lie at ``slots``, one for each of its tokens. They are computed, or on a GPU
        will be once what the caller's stream holds is done."""
        token_bytes = self._source.token_bytes(block.layers)
        if token_bytes == 0:
            return
        mark = self._side.mark()
        slots = slots.clone()  # the table's own tensor is reused when the table goes
        whole, multiple = self._sender.checksums, self._sender.multiple
        for chunk in chunks(block, token_bytes, one_message=whole, multiple=multiple):
            self._put(ticket, partial(self._send_rows, ticket, chunk, _rows_of(chunk, block, slots), mark))

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """Send ``rows`` [T, row_width], which nobody writes to any more; the first of them is token ``first_token``."""
        mark = self._side.mark()
        block = RowBlock(HIDDEN, NO_LAYERS, range(first_token, first_token + rows.shape[0]))
        row_bytes = rows.shape[1] * self._source.hidden_dtype.itemsize
        for chunk in chunks(block, row_bytes, one_message=True, multiple=self._sender.multiple):
            self._put(ticket, partial(self._send_hidden, ticket, chunk, _rows_of(chunk, block, rows), mark))

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """Send the seed of decoding; ends the hand-off. ``hidden``: [rows, hidden_size], copied at once."""
        data = None if hidden is None else hidden.to(self._device, self._source.hidden_dtype, copy=True)
        mark = self._side.mark()

        def send() -> None:
            if ticket not in self._given_up:
                with self._side.after(mark):
                    self._sender.state(ticket, state, data)

        self._put(ticket, send)

    def abort(self, ticket: str, reason: str) -> None:
        """Give a hand-off up: what waits is skipped; the receiver is told even if Begin has not left yet."""
        with self._lock:
            self._given_up.add(ticket)
        self._sender.abort(ticket, reason)

        def abort() -> None:
            self._sender.abort(ticket, reason)  # nothing, unless Begin was behind the first attempt
            with self._lock:
                self._given_up.discard(ticket)

        self._put(ticket, abort)

    def close(self, timeout_s: float) -> None:
        """End the thread; close the sender first, so that nothing can block here. Blocks."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join(timeout_s)

    def _send_hidden(self, ticket: str, chunk: RowBlock, rows: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        if ticket not in self._given_up:
            with self._side.after(mark):
                data = self._side.reads(rows).to(self._device, self._source.hidden_dtype)
                self._sender.chunk(ticket, chunk, data.reshape(-1))

    def _send_rows(self, ticket: str, chunk: RowBlock, slots: torch.Tensor, mark: torch.cuda.Event | None) -> None:
        if ticket in self._given_up:
            return
        num_bytes = len(chunk.tokens) * self._source.token_bytes(chunk.layers)
        parts = messages(chunk, num_bytes, self._sender.multiple)
        with self._side.after(mark):
            if len(parts) == 1:
                self._send_message(ticket, chunk, slots, num_bytes)
            elif (opened := self._sender.open_chunk(ticket, chunk, num_bytes)) is not None:
                self._send_messages(
                    ticket, opened, [(part, _rows_of(part, chunk, slots), size) for part, size in parts]
                )

    def _send_message(self, ticket: str, chunk: RowBlock, slots: torch.Tensor, num_bytes: int) -> None:
        """A chunk of one message is announced with its bytes, and not at all once its ticket has ended."""
        room = self._take(chunk, num_bytes)
        try:
            wanted = self._gather(ticket, chunk, slots, room)
        except BaseException:
            room.done()
            raise
        if wanted:
            self._sender.chunk(ticket, chunk, room.data, room.done, self._beside(chunk, room))
        else:
            room.done()

    def _send_messages(self, ticket: str, opened: Outgoing, parts: list[tuple[RowBlock, torch.Tensor, int]]) -> None:
        """The messages of an announced chunk. All of them leave, with whatever is in the buffer once the ticket has
        ended: the receiver counts on the bytes. A link that cannot go on is lost."""
        try:
            for part, slots, num_bytes in parts:
                room = self._take(part, num_bytes)
                try:
                    self._gather(ticket, part, slots, room)
                except Exception as error:
                    log.exception("hand-off %s: rows could not be read", ticket)
                    self._sender.abort(ticket, f"rows could not be read: {error}")
                if not self._sender.give(opened, room.data, room.done, self._beside(part, room)):
                    return
        except PacelineError as error:
            self._sender.link_lost(f"an announced chunk could not be sent: {error}")

    def _take(self, block: RowBlock, num_bytes: int) -> Room:
        """Where the rows of a message are gathered."""
        buffer, lanes = self._staging.take(num_bytes), self._lanes
        number = lanes.take() if lanes is not None and lanes.carry(block.layers) else None

        def done() -> None:
            if lanes is not None and number is not None:
                lanes.give_back(number)
            self._staging.give_back(buffer)

        return Room(buffer[:num_bytes].view(self._source.dtype), number, done)

    def _beside(self, block: RowBlock, room: Room) -> Beside | None:
        """What leaves over lanes with the rows of a message."""
        lanes, number, layers, count = self._lanes, room.number, block.layers, len(block.tokens)
        if lanes is None or number is None:
            return None
        return Beside(partial(lanes.send, number, layers, count), lanes.num_bytes(layers, count))

    def _gather(self, ticket: str, block: RowBlock, slots: torch.Tensor, room: Room) -> bool:
        """Fill ``room`` with the rows, on every rank; False when the ticket has ended: they may be somebody else's by
        now."""
        with self._sender.reading(ticket) as wanted:
            if wanted:
                self._gather_beside(block, slots, room)
                self._source.gather(block.layers, slots, room.data)
            return wanted

    def _gather_beside(self, block: RowBlock, slots: torch.Tensor, room: Room) -> None:
        """On the other ranks. A link whose lanes cannot go on is lost."""
        if self._lanes is None or room.number is None:
            return
        try:
            self._lanes.gather(room.number, block.layers, slots)
        except PacelineError as error:
            self._sender.link_lost(f"lanes: {error}")
            raise

    def _put(self, ticket: str, work: Callable[[], None]) -> bool:
        with self._lock:
            if not self._closed:
                self._queue.put((ticket, work))
            return not self._closed

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, work = item
            try:
                work()
            except (HandoffFailed, TransportError) as error:
                log.debug("hand-off %s ended while rows were waiting: %s", ticket, error)  # the sender reports it
            except Exception as error:
                log.exception("hand-off %s: rows could not be sent", ticket)
                self._sender.abort(ticket, f"rows could not be sent: {error}")


def _rows_of(part: RowBlock, block: RowBlock, by_token: torch.Tensor) -> torch.Tensor:
    """What ``by_token``, which has a row for each token of ``block``, holds of those of ``part``."""
    first = block.tokens.start
    return by_token[part.tokens.start - first : part.tokens.stop - first]
