"""The lanes of one link that end at one rank.

A *lane* is the data pipe between a source rank and a destination rank, for every pair that has rows in common but that
of the two ranks 0, which have the link's own pipe. For each message of target rows on that pipe one message follows on
every lane: the same layers and tokens, of the heads that the pair has in common. So nothing on a lane says what it is.

Rank 0 says what is done and with which of the buffers, which every rank has under the same numbers. The rows of a
message on a lane are never more than those of ranks 0, since no pair has more heads in common. With checksums the
CRC-32 of the rows follows them in the same message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kv_transfer.lanes.options import LaneOptions
from kv_transfer.layout.reshard import ReshardPlan
from kv_transfer.layout.rows import RowSource, RowTarget
from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS, Pending, Transport, TransportError
from kv_transfer.transports.crc import crc32
from kv_transfer.transports.registry import open_transport, staging_device
from kv_transfer.transports.side_stream import finish_queued
from paceline.errors import HandoffFailed
from paceline.host_memory import host_zeros
from paceline.kvcache.pool import KvPool

SUM_BYTES = 4


class Lane:
    """This rank's end of one lane."""

    def __init__(
        self, transport: Transport, rows: RowSource | RowTarget, device: torch.device, checksums: bool
    ) -> None:
        """device: where the transport reads from or writes to. checksums: for host memory alone."""
        self.transport, self.rows, self._device = transport, rows, device
        self._wire, self._checksums = rows.plan.wire, checksums
        self._buffers = [self._make(MESSAGE_BYTES + SUM_BYTES) for _ in range(NUM_BUFFERS)]

    def message(self, number: int, layers: range, count: int) -> Tensor:
        """Room for a message of ``count`` tokens in a buffer, uint8: rows, and with checksums their sum; empty where no
        layer of ``layers`` crosses here."""
        rows_bytes = self._rows_bytes(layers, count)
        num_bytes = rows_bytes + (SUM_BYTES if rows_bytes and self._checksums else 0)
        if num_bytes > self._buffers[number].numel():  # a single token of more than a message
            self._buffers[number] = self._make(1 << (num_bytes - 1).bit_length())
        return self._buffers[number][:num_bytes]

    def gather(self, number: int, layers: range, slots: Tensor) -> None:
        """Fill a buffer with the rows at ``slots`` [T]."""
        data, total = self._parts(number, layers, len(slots))
        if data.numel() and isinstance(self.rows, RowSource):
            self.rows.gather(layers, slots, data)
            if self._checksums:
                total.copy_(_bytes_of(crc32(data)))

    def check(self, number: int, layers: range, count: int) -> None:
        """HandoffFailed when what has arrived in a buffer is not what the peer has sent."""
        data, total = self._parts(number, layers, count)
        if data.numel() and self._checksums and not torch.equal(total, _bytes_of(crc32(data))):
            source, dest = self.rows.plan.source.rank, self.rows.plan.dest.rank
            raise HandoffFailed(
                f"checksum of {count} rows from rank {source} for rank {dest}, layers {layers.start}..{layers.stop - 1}"
                ": other bytes arrived than were sent"
            )

    def scatter(self, number: int, layers: range, slots: Tensor) -> None:
        """Store what has arrived in a buffer at ``slots`` [T]."""
        data, _ = self._parts(number, layers, len(slots))
        if data.numel() and isinstance(self.rows, RowTarget):
            self.rows.scatter(layers, slots, data)

    def _parts(self, number: int, layers: range, count: int) -> tuple[Tensor, Tensor]:
        """The rows of a message, in the destination's dtype, and what follows them."""
        message, rows_bytes = self.message(number, layers, count), self._rows_bytes(layers, count)
        return message[:rows_bytes].view(self._wire.dtype), message[rows_bytes:]

    def _rows_bytes(self, layers: range, count: int) -> int:
        return count * sum(self._wire.layers[layer].row_elems for layer in layers) * self._wire.dtype.itemsize

    def _make(self, num_bytes: int) -> Tensor:
        if self._device.type == "cpu":
            return host_zeros(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class LaneEnds:
    """One rank's ends, which move together. A failed transport ends all of them.

    Made by whoever may block: it opens them one by one, in the order of both sides. TransportError when a peer does not
    come, ConfigError for a transport that cannot work here; what is open by then is aborted.
    """

    def __init__(self, options: LaneOptions, rank: int, pool: KvPool, store: Any) -> None:
        """pool: what this rank holds. store: of the link, a `LinkStore`."""
        self._pool = pool
        self._lanes: list[Lane] = []
        self._dead = False
        device = staging_device(options.transport, pool.device)
        try:
            for plan in options.of_rank(rank):
                rows = RowSource(pool, plan) if options.sends else RowTarget(pool, plan)
                self._lanes.append(Lane(_open(options, plan, store, device), rows, device, options.checksums))
        except BaseException:
            self.abort()
            raise

    def gather(self, number: int, layers: range, slots: Tensor) -> None:
        """Fill buffer ``number`` of every lane with the rows at ``slots`` [T]."""
        for lane in self._lanes:
            lane.gather(number, layers, slots)
        finish_queued(self._pool.device)

    def send(self, number: int, layers: range, count: int) -> Pending:
        """Let what buffer ``number`` holds leave; `Transport.start_send`."""
        return self._started(number, layers, count, lambda transport, data: transport.start_send(data))

    def receive(self, number: int, layers: range, count: int) -> Pending:
        """The next message may arrive in buffer ``number``; `Transport.start_recv`."""
        return self._started(number, layers, count, lambda transport, data: transport.start_recv(data))

    def scatter(self, number: int, layers: range, slots: Tensor) -> None:
        """Store what has arrived in buffer ``number`` at ``slots`` [T]; it lies there when this returns.
        TransportError when the lanes have ended: what should have arrived may not have. HandoffFailed when other bytes
        have arrived than were sent: none of them is stored, and the lanes go on."""
        if self._dead:
            raise TransportError("the lanes have ended")
        for lane in self._lanes:
            lane.check(number, layers, len(slots))
        for lane in self._lanes:
            lane.scatter(number, layers, slots)
        finish_queued(self._pool.device)

    def close(self) -> None:
        """Orderly end. Idempotent, from any thread."""
        self._dead = True
        for lane in self._lanes:
            lane.transport.close()

    def abort(self) -> None:
        """End at once. Idempotent, from any thread; what waits returns with TransportError, see Transport."""
        self._dead = True
        for lane in self._lanes:
            lane.transport.abort()

    def _started(
        self, number: int, layers: range, count: int, start: Callable[[Transport, Tensor], Pending]
    ) -> Pending:
        try:
            moving = [(lane.transport, lane.message(number, layers, count)) for lane in self._lanes]
            waits = [start(transport, data) for transport, data in moving if data.numel()]
        except BaseException:
            self.abort()
            raise

        def wait() -> None:
            try:
                for one in waits:
                    one()
            except BaseException:
                self.abort()
                raise

        return wait


def _bytes_of(checksum: int) -> Tensor:
    """uint8 [SUM_BYTES]."""
    return torch.frombuffer(bytearray(checksum.to_bytes(SUM_BYTES, "little")), dtype=torch.uint8)


def _open(options: LaneOptions, plan: ReshardPlan, store: Any, device: torch.device) -> Transport:
    return open_transport(
        options.transport,
        store,
        options.prefix(plan),
        0 if options.sends else 1,
        options.host,
        options.timeout_s,
        device,
        sealed=options.sealed,
    )
