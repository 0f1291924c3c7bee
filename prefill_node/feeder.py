"""Takes rows off the pool and gives them to a link's sender, on one thread per link.

Queue: produced by the engine thread (descriptors: which slots of which layers), consumed in order by the feeder
thread. Rows are gathered only when their turn comes and the sender has room, so however slow a link is, no more than
the sender's own queue is ever copied; until then the rows wait in the pages that the sequence holds. The number of
descriptors is bounded by the chunks of the prompts that hold pages.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from kv_transfer.handoff import HIDDEN, ByteClass
from kv_transfer.rows import RowSource
from kv_transfer.sender import HandoffSender
from kv_transfer.transport import TransportError
from paceline.errors import HandoffFailed, PacelineError
from paceline.v1 import handoff_pb2

log = logging.getLogger(__name__)

PIECE_BYTES = 16 * 1024 * 1024  # of one Chunk: large enough for line rate, small enough to stage


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
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._given_up: set[str] = set()  # tickets whose descriptors are skipped
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="handoff-feeder", daemon=True)
        self._thread.start()

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
        """Send the rows at ``slots`` [T] of ``layers``; the first of them is token ``first_token``."""
        token_bytes = self._source.token_bytes(layers)
        if token_bytes == 0:
            return
        piece = max(1, PIECE_BYTES // token_bytes)
        for start in range(0, slots.shape[0], piece):
            part = slots[start : start + piece].clone()  # the table's own tensor is reused when the table goes
            self._put(ticket, self._sending(ticket, byte_class, layers, part, first_token + start))

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """Send ``rows`` [T, row_width], which nobody writes to any more; the first of them is token ``first_token``."""
        piece = max(1, PIECE_BYTES // (rows.shape[1] * self._source.dtype.itemsize))
        for start in range(0, rows.shape[0], piece):
            self._put(ticket, self._sending_hidden(ticket, rows[start : start + piece], first_token + start))

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """Send the seed of decoding; ends the hand-off. ``hidden``: [rows, hidden_size], copied at once."""
        data = None if hidden is None else hidden.to(self._device, self._source.dtype, copy=True)

        def send() -> None:
            if ticket not in self._given_up:
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

    def _sending_hidden(self, ticket: str, rows: torch.Tensor, first_token: int) -> Callable[[], None]:
        def send() -> None:
            if ticket not in self._given_up:
                data = rows.to(self._device, self._source.dtype).reshape(-1)
                self._sender.chunk(ticket, HIDDEN, 0, 0, first_token, rows.shape[0], data)

        return send

    def _sending(
        self, ticket: str, byte_class: ByteClass, layers: range, slots: torch.Tensor, first_token: int
    ) -> Callable[[], None]:
        def send() -> None:
            if ticket in self._given_up:
                return
            data = self._source.gather(layers, slots).to(self._device)
            self._sender.chunk(ticket, byte_class, layers.start, len(layers), first_token, slots.shape[0], data)

        return send

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
