"""The seam between hand-off logic and a wire: one in-order, one-directional byte pipe, prefill -> decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from paceline.errors import PacelineError

MESSAGE_BYTES = 4 * 1024 * 1024  # of a message, at most, times the link's `Transport.multiple`
WINDOW_BYTES = 8 * MESSAGE_BYTES  # a chunk leaves while less than this, times that, waits for the receiver's credit
CHUNK_BYTES = 8 * MESSAGE_BYTES  # that one descriptor announces, at most, or one message
NUM_BUFFERS = 4  # of each end: one on the wire, one being filled or scattered, two ready

Rank = Literal[0, 1]  # of a link: 0 is prefill and sends, 1 is decode and receives
Pending = Callable[[], None]  # waits until a started send or receive is done; TransportError as those raise it


class TransportError(PacelineError):
    """The pipe broke, timed out or is closed. It is dead from then on: open a new one under a new link id."""


class MessageRefused(TransportError):
    """The peer sent what no end of ours sends. The link ends, as with every TransportError."""


class StillInFlight(TransportError):
    """The wait for a message of a dead pipe is over, and the device may still read or write its memory: nobody may use
    that again. The transport keeps it."""


def message_slices(num_bytes: int, multiple: int = 1) -> tuple[slice, ...]:
    """Cut ``num_bytes`` into messages of at most ``multiple`` times 4 MiB, as byte ranges in order; no message for 0
    bytes.

    Both sides derive it from the byte count and the link's multiple alone. Small messages keep the timeout of one
    message short, and between hosts 4 MiB of them cost no bandwidth.
    """
    most = MESSAGE_BYTES * multiple
    return tuple(slice(start, min(start + most, num_bytes)) for start in range(0, num_bytes, most))


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor of any dtype: uint8 [num_bytes], sharing memory. ValueError if strided."""
    if not tensor.is_contiguous():
        raise ValueError("a transported tensor must be contiguous")
    if tensor.dtype is torch.uint8 and tensor.dim() == 1:
        return tensor
    return tensor.reshape(-1).view(torch.uint8)


class Transport(ABC):
    """One direction of one link. One thread sends, one thread at the other end receives.

    Nothing is matched by tag: the n-th message received is the n-th one sent (NCCL knows no other rule). So both
    ends must name the same byte counts in the same order, which the control stream sees to.

    ``close`` and ``abort`` may be called from any thread, and more than once.
    """

    multiple: int = 1  # of MESSAGE_BYTES that a message may have, as both ends agreed when they paired
    takes_less = False  # whether a message may be shorter than the bytes that its receive waits for

    def send(self, tensor: Tensor) -> None:
        """Hand the bytes of ``tensor`` (contiguous, any dtype) to the wire; blocks, each message for at most the
        message timeout. TransportError if the pipe is or becomes dead."""
        data = byte_view(tensor)
        for piece in message_slices(data.numel(), self.multiple):
            self._send_message(data[piece])

    def recv(self, tensor: Tensor) -> None:
        """Fill ``tensor`` (contiguous) with the next ``tensor.nbytes`` bytes; blocks, each message for at most the
        message timeout. TransportError if the pipe is or becomes dead: the content is then undefined."""
        data = byte_view(tensor)
        for piece in message_slices(data.numel(), self.multiple):
            self._recv_message(data[piece])

    def start_send(self, tensor: Tensor) -> Pending:
        """`send` in two steps: the bytes may leave from now on, and have left when what is returned has been called.
        Started sends are awaited in order, each once, on a dead pipe too; ``tensor`` is not written to until then. The
        wait ends, with or without an error, when nothing reads ``tensor`` any more, but for StillInFlight."""
        return lambda: self.send(tensor)

    def start_recv(self, tensor: Tensor) -> Pending:
        """`recv` in two steps, likewise: ``tensor`` may be written to from now on until the wait has ended, also when
        the pipe dies."""
        return lambda: self.recv(tensor)

    @abstractmethod
    def _send_message(self, data: Tensor) -> None:
        """Send one message; ``data`` is uint8 [1 to multiple * MESSAGE_BYTES]."""

    @abstractmethod
    def _recv_message(self, data: Tensor) -> None:
        """Receive one message of exactly ``data.numel()`` bytes into ``data``, uint8 [1 to multiple *
        MESSAGE_BYTES]."""

    @abstractmethod
    def close(self) -> None:
        """Orderly end, once no send or receive is under way: give threads and sockets back."""

    @abstractmethod
    def abort(self) -> None:
        """End at once. A call that is blocked returns with TransportError, at the latest after the message
        timeout; until it has, its tensor may still be written."""
