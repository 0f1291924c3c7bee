"""The buffers that bytes of a link pass through: gathered into at the source, received into at the destination.

Both kinds are made once and used again: touching fresh memory costs more than the copy itself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import torch
from torch import Tensor

from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS, Pending, Transport, TransportError, message_slices
from paceline.errors import DeadlineExceeded
from paceline.host_memory import host_zeros

CREDIT_BYTES = 4 * MESSAGE_BYTES  # times the link's multiple: credit is told when so many bytes have come together


def _buffers(count: int, num_bytes: int, device: torch.device | str, pinned: bool = False) -> list[Tensor]:
    """uint8, one behind the other; of the host's memory, what is not touched is not there."""
    if torch.device(device).type == "cpu" and not pinned:
        memory = host_zeros(count * num_bytes)
    else:
        memory = torch.empty(count * num_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    return list(torch.split(memory, num_bytes))


class StagingRing:
    """A link's send buffers, made once: what is gathered and not sent yet never exceeds them.

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
        self._timeout_s = timeout_s
        self._free = _buffers(num_buffers, num_bytes, device, pinned)
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
            buffer = self._free.pop()  # the one used last: its bytes are still in a cache
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
        return bool(self._free)

    def _make(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)


class Staging:
    """Receive buffers, so that messages arrive while one before them is scattered. One thread uses them.

    ``device``: where the transport writes to. ``pinned``: page-locked host memory, for rows that go onto a GPU.
    """

    def __init__(self, transport: Transport, device: torch.device | str, *, pinned: bool = False) -> None:
        self._transport = transport
        self.multiple = transport.multiple
        self._device, self._pinned = device, pinned
        self._free = _buffers(NUM_BUFFERS, MESSAGE_BYTES * self.multiple, device, pinned)
        self._expected: deque[tuple[int, Tensor, Pending]] = deque()  # bytes on their way, and into which buffer
        self._last: Tensor | None = None  # what the latest `receive` gave lies in
        self._taken = 0  # bytes received whose credit was not told yet

    def receive(self, num_bytes: int) -> Tensor:
        """The next bytes, uint8 [num_bytes]: valid until the next call. The caller bounds ``num_bytes``. A buffer grows
        to the next power of two of its largest receive."""
        self._give_back()
        if num_bytes == 0:  # no message brings nothing
            return self._free[-1][:0] if self._free else self._expected[0][1][:0]
        if self._expected:
            self._last = self._await(num_bytes)
        else:
            self._last = self._free.pop()
            if num_bytes > self._last.numel():
                size = 1 << (num_bytes - 1).bit_length()
                self._last = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
            self._receive(self._last[:num_bytes])
        return self._last[:num_bytes]

    def expect(self, sizes: Iterable[int]) -> None:
        """What the calls after this one will ask for, in order: it may arrive from now on, while the bytes of the last
        `receive` are still in use. Those expected before are among ``sizes``. As many as there are buffers; nothing
        behind a size of more than one message, which is received when it is asked for."""
        for num_bytes in islice(sizes, len(self._expected), None):
            if not self._free or num_bytes > MESSAGE_BYTES * self.multiple:
                return
            buffer = self._free.pop()
            self._expected.append((num_bytes, buffer, self._transport.start_recv(buffer[:num_bytes])))

    def receive_new(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The next bytes in a tensor of their own, [num_rows, width]."""
        num_bytes = num_rows * width * dtype.itemsize
        return self.receive(num_bytes).view(dtype).view(num_rows, width).clone()

    def drain(self, sizes: Iterable[int]) -> None:
        """Receive and forget messages of ``sizes``, any numbers of bytes."""
        self._give_back()
        for num_bytes in sizes:
            if self._expected:
                self._free.append(self._await(num_bytes))
                continue
            for piece in message_slices(num_bytes, self.multiple):
                self._receive(self._free[-1][: piece.stop - piece.start])

    def settle(self) -> None:
        """The link is dead: wait until the transport writes into no buffer any more, each message within the
        transport's bounds. Call nothing else afterwards, and let the buffers go."""
        while self._expected:
            _, _, wait = self._expected.popleft()
            with suppress(TransportError):
                wait()

    def credit(self) -> int:
        """Bytes that the sender may send beyond those told before; 0 until it is worth a message. Called when what
        `receive` gave is not needed any more."""
        if self._taken < CREDIT_BYTES * self.multiple:
            return 0
        taken, self._taken = self._taken, 0
        return taken

    def _give_back(self) -> None:
        if self._last is not None:
            self._free.append(self._last)
            self._last = None

    def _await(self, num_bytes: int) -> Tensor:
        """The buffer of the first of those expected, once it is there."""
        expected, buffer, wait = self._expected[0]
        if expected != num_bytes:
            raise TransportError(f"{num_bytes} bytes are taken where {expected} were expected")
        wait()
        self._expected.popleft()
        self._taken += num_bytes
        return buffer

    def _receive(self, data: Tensor) -> None:
        self._transport.recv(data)
        self._taken += data.nbytes
