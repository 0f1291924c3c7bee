"""Frames between rank 0 and one follower, over a pair of sockets that nobody else can open.

A frame is a header (magic, version, kind, number, bytes of body; little-endian) and a body of fields. A field is the
number of its bytes and the bytes: an array whose dtype the kind of frame fixes.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from paceline.errors import NodeUnavailable

MAGIC, VERSION = b"PCLR", 1
HEADER = struct.Struct("<4sHHQQ")
FIELD = struct.Struct("<Q")
MAX_BODY = 1 << 32  # bytes; a scatter of a whole pool's rows is cut into messages long before
SMALL_BODY = 1 << 16  # bytes that leave in one piece
FRAME_TIMEOUT_S = 30.0  # from the first to the last byte of a frame

Array = np.ndarray[Any, np.dtype[Any]]


class Kind(IntEnum):
    """What a frame says; the fields of each kind are in commands.py."""

    OPTIONS = 1
    READY = 2
    FAILED = 3
    STOP = 4
    FORWARD = 16
    LOGITS = 17
    EMBED = 18
    COPY_SLOTS = 19
    GATHER = 32
    SCATTER = 33
    ROWS = 34
    DONE = 35
    PART = 48
    LANES_OPEN = 64
    LANES_KEY = 65
    LANES_GATHER = 66
    LANES_SEND = 67
    LANES_RECEIVE = 68
    LANES_SCATTER = 69
    LANES_END = 70
    LANES_DONE = 71
    LANES_BROKEN = 72
    LANES_CORRUPT = 73


@dataclass(frozen=True)
class Frame:
    """One frame as it came. ``number``: of commands and of questions about lanes, counted from 1."""

    kind: Kind
    number: int
    body: bytearray

    def fields(self, *dtypes: type[np.generic]) -> list[Array]:
        """The body's arrays, one of each dtype. Raises ValueError when it has other fields."""
        found: list[Array] = []
        at = 0
        for dtype in dtypes:
            if at + FIELD.size > len(self.body):
                raise ValueError(f"{self.kind.name}: {len(found)} of {len(dtypes)} fields")
            (size,) = FIELD.unpack_from(self.body, at)
            at += FIELD.size
            if size > len(self.body) - at:
                raise ValueError(f"{self.kind.name}: field {len(found)} has {size} bytes of {len(self.body) - at}")
            found.append(np.frombuffer(memoryview(self.body)[at : at + size], dtype=dtype))
            at += size
        if at != len(self.body):
            raise ValueError(f"{self.kind.name}: {len(self.body) - at} bytes after the last field")
        return found


class Closed(NodeUnavailable):
    """The other end is gone."""


class Channel:
    """One end. Sends and receives may run at once; each of the two on one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        """end: of a Unix stream pair; the channel owns it."""
        self._socket = end
        end.setblocking(False)  # a socket with a timeout of its own would wait in each call for that long
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable.register(end, select.POLLOUT)

    def send(self, kind: Kind, number: int = 0, fields: Sequence[Array] = ()) -> None:
        """Raises Closed when the other end is gone, NodeUnavailable when it takes nothing for FRAME_TIMEOUT_S."""
        views = [np.ascontiguousarray(field).data.cast("B") if field.size else b"" for field in fields]
        size = sum(map(len, views)) + FIELD.size * len(views)
        parts: list[memoryview | bytes] = [HEADER.pack(MAGIC, VERSION, kind, number, size)]
        for view in views:
            parts += [FIELD.pack(len(view)), view]
        deadline = time.monotonic() + FRAME_TIMEOUT_S
        try:
            for part in [b"".join(parts)] if size <= SMALL_BODY else parts:
                self._push(memoryview(part), deadline)
        except TimeoutError as error:
            raise NodeUnavailable(f"{kind.name} was not taken within {FRAME_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise Closed(f"{kind.name} cannot be sent: {error}") from error

    def wait(self) -> None:
        """Until there is something to receive, or the other end is gone."""
        self._wait(None)

    def receive(self, timeout_s: float | None) -> Frame:
        """The next frame; waits ``timeout_s`` for its first byte, for ever with None. Raises Closed when the other end
        is gone, NodeUnavailable when it is late, ValueError for bytes that are no frame."""
        self._wait(timeout_s)
        deadline = time.monotonic() + FRAME_TIMEOUT_S
        head = bytearray(HEADER.size)
        self._fill(memoryview(head), deadline)
        magic, version, kind, number, size = HEADER.unpack(head)
        if magic != MAGIC or version != VERSION or size > MAX_BODY:
            raise ValueError(f"not a frame of version {VERSION}: {bytes(head)!r}")
        body = bytearray(size)
        self._fill(memoryview(body), deadline)
        return Frame(Kind(kind), number, body)

    def shut(self) -> None:
        """End every wait at both ends. Idempotent, from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Give the socket back, once no thread uses the channel."""
        self.shut()
        self._socket.close()

    def _push(self, data: memoryview, deadline: float) -> None:
        """Raises TimeoutError past the deadline."""
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                if not self._writable.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise TimeoutError from None

    def _fill(self, room: memoryview, deadline: float) -> None:
        while room:
            try:
                got = self._socket.recv_into(room)
            except BlockingIOError:
                self._wait(deadline - time.monotonic())
                continue
            except OSError as error:
                raise Closed(f"the other rank is gone: {error}") from error
            if not got:
                raise Closed("the other rank is gone")
            room = room[got:]

    def _wait(self, timeout_s: float | None) -> None:
        """Until there is something to read, or the other end is gone."""
        if not self._readable.poll(None if timeout_s is None else 1000 * max(0.0, timeout_s)):
            raise NodeUnavailable("the other rank is silent")
