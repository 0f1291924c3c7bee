"""A transport whose messages are encrypted: AES-256-GCM with a key of the link, over any pipe of host memory.

Rank 0 draws the key and tells it on the link's control stream, so whoever reads that stream reads the rows: it must be
encrypted itself. A message is sealed with its number, so one that was changed, left out, repeated or put in another
place is refused, and the link ends. Over gloo each receive waits for as much as a message may be: gloo ends the process
where more comes than is waited for, as from a peer that announces less than it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from kv_transfer.transports.base import (
    MESSAGE_BYTES,
    MessageRefused,
    Pending,
    Rank,
    Transport,
    TransportError,
    byte_view,
)

TAG_BYTES = 16
NUMBER_BYTES = 12
PLAIN_BYTES = MESSAGE_BYTES - TAG_BYTES  # of a message, which is one of the pipe's when it is sealed
MAX_SPARE = 4  # buffers that wait for the next message
KEY = "seal"


class SealedTransport(Transport):
    """One end of a pipe over ``inner``. Bytes are sealed and opened by whoever starts a send and awaits a receive."""

    def __init__(self, inner: Transport, key: bytes, link_id: str) -> None:
        self._inner, self._link_id = inner, link_id
        self._cipher = AESGCM(key)
        self._sealed = self._opened = 0  # messages so far
        self._spare: list[Tensor] = []

    def send(self, tensor: Tensor) -> None:
        """See Transport."""
        self.start_send(tensor)()

    def recv(self, tensor: Tensor) -> None:
        """See Transport."""
        self.start_recv(tensor)()

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport. ``tensor`` may be written to as soon as this returns."""
        data = byte_view(tensor)
        buffer, sealed = self._buffer(data.numel())
        for message, piece in _messages(sealed, data):
            self._cipher.encrypt_into(self._number(self._sealed), piece.numpy().data, None, message.numpy().data)
            self._sealed += 1
        sent = self._inner.start_send(sealed)

        def wait() -> None:
            sent()
            self._keep(buffer)

        return wait

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport."""
        data = byte_view(tensor)
        stride = MESSAGE_BYTES if self._inner.takes_less else 0
        buffer, sealed = self._buffer(data.numel(), stride)
        received = self._inner.start_recv(sealed)

        def wait() -> None:
            received()
            for message, piece in _messages(sealed, data, stride):
                self._open(message, piece)
            self._keep(buffer)

        return wait

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def _open(self, message: Tensor, piece: Tensor) -> None:
        """Fill ``piece`` with what ``message`` holds."""
        try:
            self._cipher.decrypt_into(self._number(self._opened), message.numpy().data, None, piece.numpy().data)
        except InvalidTag:
            self.abort()
            raise MessageRefused(f"link {self._link_id}: message {self._opened} is not what the peer sealed") from None
        self._opened += 1

    def _number(self, message: int) -> bytes:
        """Sets a message apart from all others of the link's key: bytes go one way alone."""
        return message.to_bytes(NUMBER_BYTES, "big")

    def _buffer(self, num_bytes: int, stride: int = 0) -> tuple[Tensor, Tensor]:
        """Memory, new or used before, and of it what ``num_bytes`` take with a tag for each message. The system takes
        its time to give new memory. stride: as of ``_messages``."""
        count = -(-num_bytes // PLAIN_BYTES)
        wanted = count * stride or num_bytes + TAG_BYTES * count
        fitting = next((i for i, spare in enumerate(self._spare) if spare.numel() >= wanted), None)
        buffer = torch.empty(wanted, dtype=torch.uint8) if fitting is None else self._spare.pop(fitting)
        return buffer, buffer[:wanted]

    def _keep(self, buffer: Tensor) -> None:
        self._spare.append(buffer)
        self._spare.sort(key=Tensor.numel)
        del self._spare[:-MAX_SPARE]

    def _send_message(self, data: Tensor) -> None:
        self.send(data)

    def _recv_message(self, data: Tensor) -> None:
        self.recv(data)


def _messages(sealed: Tensor, data: Tensor, stride: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Each message in ``sealed``, and the bytes of ``data`` that it is made of. stride: from one to the next, in bytes;
    0: they lie one behind the other."""
    at = 0
    for start in range(0, data.numel(), PLAIN_BYTES):
        piece = data[start : start + PLAIN_BYTES]
        yield sealed[at : at + piece.numel() + TAG_BYTES], piece
        at += stride or piece.numel() + TAG_BYTES


def sealed_end(inner: Transport, store: Any, link_id: str, rank: Rank) -> SealedTransport:
    """One end over ``inner``; ``store`` is the link's. TransportError when the key does not come in its time."""
    name = f"{link_id}/{KEY}"
    try:
        if rank == 0:
            key = AESGCM.generate_key(256)
            store.set(name, key)
        else:
            key = store.get(name)
        return SealedTransport(inner, key, link_id)
    except (RuntimeError, ValueError) as error:
        inner.abort()
        raise TransportError(f"link {link_id}: the peer told no key for the rows: {error}") from error
