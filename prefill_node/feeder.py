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
from functools import partial

import torch

from kv_transfer.handoff.cut import message_tokens, token_pieces
from kv_transfer.handoff.outbox import Outgoing
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.staging import StagingRing
from kv_transfer.handoff.state import HIDDEN, ByteClass
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import CHUNK_BYTES, MESSAGE_BYTES, TransportError
from kv_transfer.transports.side_stream import SideStream
from paceline.errors import HandoffFailed, PacelineError
from paceline.v1 import handoff_pb2
from prefill_node.groups import layer_groups

log = logging.getLogger(__name__)


class RowFeeder:
    """One link's feeder. No method blocks, but ``close``.

    ``device`` is where the transport reads from. ``refused(ticket, reason)`` tells that a hand-off could not even
    begin, so that the sender will never report it; it is called on the feeder thread or on the caller's.
    """

    def __init__(
        self, sender: HandoffSender, source: RowSource, device: torch.device, refused: Callable[[str, str], None]
    ) -> None:
        self._sender = sender
        self._source = source
        self._device = device
        self._refused = refused
        self._staging = StagingRing(device, pinned=source.device.type == "cuda" and device.type == "cpu")
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
        return layer_groups(sizes, layers.start)

    def begin(self, ticket: str, first_token: int, num_tokens: int) -> None:
        """Open the hand-off of rows ``first_token`` to ``first_token + num_tokens - 1``."""

        def begin() -> None:
            try:
                self._sender.begin(ticket, first_token, num_tokens, self._source.plan.name)
            except PacelineError as error:
                self._refused(ticket, str(error))

        if not self._put(ticket, begin):
            self._refused(ticket, "the link is closed")

    def rows(self, ticket: str, byte_class: ByteClass, layers: range, slots: torch.Tensor, first_token: int) -> None:
        """Send the rows at ``slots`` [T] of ``layers``; the first of them is token ``first_token``. They are computed,
        or on a GPU will be once what the caller's stream holds is done."""
        token_bytes = self._source.token_bytes(layers)
        if token_bytes == 0:
            return
        mark = self._side.mark()
        slots = slots.clone()  # the table's own tensor is reused when the table goes
        most = MESSAGE_BYTES if self._sender.checksums else CHUNK_BYTES
        for piece in token_pieces(slots.shape[0], token_bytes, most):
            part = slots[piece.start : piece.stop]
            self._put(
                ticket, partial(self._send_rows, ticket, byte_class, layers, part, first_token + piece.start, mark)
            )

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """Send ``rows`` [T, row_width], which nobody writes to any more; the first of them is token ``first_token``."""
        mark = self._side.mark()
        for piece in token_pieces(rows.shape[0], rows.shape[1] * self._source.dtype.itemsize):
            part = rows[piece.start : piece.stop]
            self._put(ticket, partial(self._send_hidden, ticket, part, first_token + piece.start, mark))

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """Send the seed of decoding; ends the hand-off. ``hidden``: [rows, hidden_size], copied at once."""
        data = None if hidden is None else hidden.to(self._device, self._source.dtype, copy=True)
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

    def _send_hidden(self, ticket: str, rows: torch.Tensor, first_token: int, mark: torch.cuda.Event | None) -> None:
        if ticket not in self._given_up:
            with self._side.after(mark):
                data = rows.to(self._device, self._source.dtype).reshape(-1)
                self._sender.chunk(ticket, HIDDEN, 0, 0, first_token, rows.shape[0], data)

    def _send_rows(
        self,
        ticket: str,
        byte_class: ByteClass,
        layers: range,
        slots: torch.Tensor,
        first_token: int,
        mark: torch.cuda.Event | None,
    ) -> None:
        if ticket in self._given_up:
            return
        num_tokens, token_bytes = slots.shape[0], self._source.token_bytes(layers)
        where = (byte_class, layers.start, len(layers), first_token, num_tokens)
        pieces = message_tokens(num_tokens, num_tokens * token_bytes)
        with self._side.after(mark):
            if len(pieces) == 1:
                data, done = self._take(num_tokens * token_bytes)
                try:
                    wanted = self._gather(ticket, layers, slots, data)
                except BaseException:
                    done()
                    raise
                if wanted:
                    self._sender.chunk(ticket, *where, data, done)
                else:
                    done()
            elif (chunk := self._sender.open_chunk(ticket, *where, num_tokens * token_bytes)) is not None:
                self._send_messages(ticket, chunk, layers, [slots[piece.start : piece.stop] for piece in pieces])

    def _send_messages(self, ticket: str, chunk: Outgoing, layers: range, pieces: list[torch.Tensor]) -> None:
        """The messages of an announced chunk. All of them leave, with whatever is in the buffer once the ticket has
        ended: the receiver counts on the bytes. A link that cannot go on is lost."""
        try:
            for slots in pieces:
                data, done = self._take(slots.shape[0] * self._source.token_bytes(layers))
                try:
                    self._gather(ticket, layers, slots, data)
                except Exception as error:
                    log.exception("hand-off %s: rows could not be read", ticket)
                    self._sender.abort(ticket, f"rows could not be read: {error}")
                if not self._sender.give(chunk, data, done):
                    return
        except PacelineError as error:
            self._sender.link_lost(f"an announced chunk could not be sent: {error}")

    def _take(self, num_bytes: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """A staging buffer of the rows' dtype, and how to give it back."""
        buffer = self._staging.take(num_bytes)
        return buffer[:num_bytes].view(self._source.dtype), partial(self._staging.give_back, buffer)

    def _gather(self, ticket: str, layers: range, slots: torch.Tensor, data: torch.Tensor) -> bool:
        """Fill ``data`` with the rows; False when the ticket has ended: they may be somebody else's by now."""
        with self._sender.reading(ticket) as wanted:
            if wanted:
                self._source.gather(layers, slots, data)
            return wanted

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
