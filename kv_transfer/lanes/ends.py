"""The lanes of one link that end at one rank.

A *lane* is the data pipe between a source rank and a destination rank, for every pair that has rows in common but that
of the two ranks 0, which have the link's own pipe. For each message of target rows on that pipe one message follows on
every lane: the same layers and tokens, of the heads that the pair has in common. So nothing on a lane says what it is.

Rank 0 says what is done and with which of the buffers, which every rank has under the same numbers. No message of a
lane is larger than that of ranks 0, since no pair has more heads in common.
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
from kv_transfer.transports.registry import open_transport, staging_device
from kv_transfer.transports.side_stream import finish_queued
from paceline.host_memory import host_zeros
from paceline.kvcache.pool import KvPool


class Lane:
    """This rank's end of one lane."""

    def __init__(self, transport: Transport, rows: RowSource | RowTarget, device: torch.device) -> None:
        """device: where the transport reads from or writes to."""
        self.transport, self.rows, self._device = transport, rows, device
        self._wire = rows.plan.wire
        self._buffers = [self._make(MESSAGE_BYTES) for _ in range(NUM_BUFFERS)]

    def data(self, number: int, layers: range, count: int) -> Tensor:
        """Room for the rows of ``count`` tokens in a buffer, of the destination's dtype; empty where no layer of
        ``layers`` crosses here."""
        elems = count * sum(self._wire.layers[layer].row_elems for layer in layers)
        num_bytes = elems * self._wire.dtype.itemsize
        if num_bytes > self._buffers[number].numel():  # a single token of more than a message
            self._buffers[number] = self._make(1 << (num_bytes - 1).bit_length())
        return self._buffers[number][:num_bytes].view(self._wire.dtype)

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
                self._lanes.append(Lane(_open(options, plan, store, device), rows, device))
        except BaseException:
            self.abort()
            raise

    def gather(self, number: int, layers: range, slots: Tensor) -> None:
        """Fill buffer ``number`` of every lane with the rows at ``slots`` [T]."""
        for lane in self._lanes:
            data = lane.data(number, layers, len(slots))
            if data.numel() and isinstance(lane.rows, RowSource):
                lane.rows.gather(layers, slots, data)
        finish_queued(self._pool.device)

    def send(self, number: int, layers: range, count: int) -> Pending:
        """Let what buffer ``number`` holds leave; `Transport.start_send`."""
        return self._started(number, layers, count, lambda transport, data: transport.start_send(data))

    def receive(self, number: int, layers: range, count: int) -> Pending:
        """The next message may arrive in buffer ``number``; `Transport.start_recv`."""
        return self._started(number, layers, count, lambda transport, data: transport.start_recv(data))

    def scatter(self, number: int, layers: range, slots: Tensor) -> None:
        """Store what has arrived in buffer ``number`` at ``slots`` [T]; it lies there when this returns.
        TransportError when the lanes have ended: what should have arrived may not have."""
        if self._dead:
            raise TransportError("the lanes have ended")
        for lane in self._lanes:
            data = lane.data(number, layers, len(slots))
            if data.numel() and isinstance(lane.rows, RowTarget):
                lane.rows.scatter(layers, slots, data)
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
            moving = [(lane.transport, lane.data(number, layers, count)) for lane in self._lanes]
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
