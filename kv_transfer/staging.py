"""Where the bytes of a link arrive, before they are scattered to pages."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.transport import MESSAGE_BYTES, Transport


class Staging:
    """A reusable receive buffer; grows to the next power of two of the largest receive. One thread uses it."""

    def __init__(self, transport: Transport, device: torch.device | str) -> None:
        self._transport = transport
        self._buffer = torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device)

    def receive(self, num_bytes: int) -> Tensor:
        """The next bytes, uint8 [num_bytes]: valid until the next call. The caller bounds ``num_bytes``."""
        if num_bytes > self._buffer.numel():
            size = 1 << (num_bytes - 1).bit_length()
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._buffer.device)
        data = self._buffer[:num_bytes]
        self._transport.recv(data)
        return data

    def receive_new(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """The next bytes in a tensor of their own, [num_rows, width]."""
        rows = torch.empty(num_rows, width, dtype=dtype, device=self._buffer.device)
        self._transport.recv(rows)
        return rows

    def drain(self, num_bytes: int) -> None:
        """Receive and forget ``num_bytes`` (any number), in pieces that leave the cutting into messages as it is."""
        while num_bytes > 0:
            piece = min(num_bytes, MESSAGE_BYTES)
            self._transport.recv(self._buffer[:piece])
            num_bytes -= piece
