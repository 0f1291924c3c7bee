"""The buffers that bytes of a link pass through: gathered into at the source, received into at the destination.

Both kinds are made once and used again: touching fresh memory costs more than the copy itself.
"""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from kv_transfer.transport import MESSAGE_BYTES, Pending, Transport, TransportError
from paceline.errors import DeadlineExceeded

NUM_BUFFERS = 4  # one being sent, one being filled, two ready
CREDIT_BYTES = MESSAGE_BYTES  # credit is told when so many bytes of it have come together


class StagingRing:
    """A link's send buffers, made when first needed: what is gathered and not sent yet never exceeds them.

    ``device``: where the transport reads from. ``pinned``: page-locked host memory, for rows that come off a GPU.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        pinned: bool = False,
        num_buffers: int = NUM_BUFFERS,
        num_bytes: int = MESSAGE_BYTES,
        timeout_s: float = 10.0,
    ) -> None:
        self._device = device
        self._pinned = pinned
        self._num_bytes = num_bytes
        self._timeout_s = timeout_s
        self._free: list[Tensor] = []
        self._unmade = num_buffers
        self._cond = threading.Condition()

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least ``num_bytes``, uint8, to be given back. Waits while all are in use; DeadlineExceeded
        after ``timeout_s``."""
        deadline = time.monotonic() + self._timeout_s
        with self._cond:
            while not self.has_room:
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise DeadlineExceeded(f"no staging buffer came free within {self._timeout_s:g} s")
                self._cond.wait(remaining)
            if self._free:
                buffer = self._free.pop()  # the one used last: its bytes are still in a cache
            else:
                self._unmade -= 1
                buffer = self._make(self._num_bytes)
        # Only a single row of more than a message's size gets here.
        return buffer if buffer.numel() >= num_bytes else self._make(1 << (num_bytes - 1).bit_length())

    def give_back(self, buffer: Tensor) -> None:
        """Nobody reads or writes ``buffer`` any more. From any thread; never blocks for long."""
        with self._cond:
            self._free.append(buffer)
            self._cond.notify()

    @property
    def has_room(self) -> bool:
        """`take` would not wait."""
        return bool(self._free) or self._unmade > 0

    def _make(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)


class Staging:
    """Two receive buffers, so that a message can arrive while the one before it is scattered. A buffer grows to the
    next power of two of its largest receive. One thread uses them."""

    def __init__(self, transport: Transport, device: torch.device | str) -> None:
        self._transport = transport
        self._device = device
        self._buffer, self._other = (torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        self._expected: tuple[int, Pending] | None = None  # bytes on their way into the other buffer
        self._taken = 0  # bytes received whose credit was not told yet

    def receive(self, num_bytes: int) -> Tensor:
        """The next bytes, uint8 [num_bytes]: valid until the next call. The caller bounds ``num_bytes``."""
        if self._expected is not None:
            return self._await(num_bytes)
        if num_bytes > self._buffer.numel():
            size = 1 << (num_bytes - 1).bit_length()
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        data = self._buffer[:num_bytes]
        self._receive(data)
        return data

    def expect(self, num_bytes: int) -> None:
        """The call after this one is `receive` or `drain` of ``num_bytes``: they may arrive from now on, while those of
        the last `receive` are still in use. Nothing happens when they are none, or more than one message."""
        if 0 < num_bytes <= MESSAGE_BYTES and self._expected is None:
            self._expected = num_bytes, self._transport.start_recv(self._other[:num_bytes])

    def receive_new(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The next bytes in a tensor of their own, [num_rows, width]."""
        num_bytes = num_rows * width * dtype.itemsize
        return self.receive(num_bytes).view(dtype).view(num_rows, width).clone()

    def drain(self, num_bytes: int) -> None:
        """Receive and forget ``num_bytes`` (any number), in pieces that leave the cutting into messages as it is."""
        if self._expected is not None:
            self._await(num_bytes)
            return
        while num_bytes > 0:
            piece = min(num_bytes, MESSAGE_BYTES)
            self._receive(self._buffer[:piece])
            num_bytes -= piece

    def credit(self) -> int:
        """Bytes that the sender may send beyond those told before; 0 until it is worth a message. Called when what
        `receive` gave is not needed any more."""
        if self._taken < CREDIT_BYTES:
            return 0
        taken, self._taken = self._taken, 0
        return taken

    def _await(self, num_bytes: int) -> Tensor:
        assert self._expected is not None
        expected, wait = self._expected
        if expected != num_bytes:
            raise TransportError(f"{num_bytes} bytes are taken where {expected} were expected")
        self._expected = None
        wait()
        self._taken += num_bytes
        self._buffer, self._other = self._other, self._buffer
        return self._buffer[:num_bytes]

    def _receive(self, data: Tensor) -> None:
        self._transport.recv(data)
        self._taken += data.nbytes
