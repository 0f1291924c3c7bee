"""A feeder, its sender and a loopback pipe, whose other end a test reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.staging import StagingRing
from kv_transfer.layout.reshard import Side, reshard
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.loopback import loopback_pair
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.v1 import handoff_pb2
from prefill_node.feeder import RowFeeder

LAYER = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 1, 4)
TOKEN_BYTES = 2 * 8 * 4  # of both layers


class Wire:
    """A feeder, its sender, and what left them."""

    def __init__(self, checksums: bool = False, staging_timeout_s: float = 10.0) -> None:
        self.messages: list[handoff_pb2.HandoffMessage] = []
        self.ended: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.kv = KvPool(KvLayout((LAYER, LAYER), torch.float32), 8, 4)
        for data in self.kv.data:
            data.copy_(torch.arange(data.numel(), dtype=torch.float32).view(data.shape))
        pipe, self.far_end = loopback_pair(max_messages=64, timeout_s=5.0)
        self.sender = HandoffSender(
            pipe,
            self._post,
            on_ended=self._on_ended,
            on_link_lost=lambda reason: None,
            checksums=checksums,
        )
        source = RowSource(self.kv, reshard(Side(self.kv.layout), Side(self.kv.layout)))
        self.feeder = RowFeeder(
            self.sender, source, torch.device("cpu"), lambda ticket, reason: self.refused.append((ticket, reason))
        )
        self.feeder._staging = StagingRing("cpu", timeout_s=staging_timeout_s)

    def _on_ended(self, ticket: str, end: handoff_pb2.HandoffAck | str) -> None:
        self.ended.append((ticket, end if isinstance(end, str) else end.WhichOneof("body") or ""))

    def _post(self, message: handoff_pb2.HandoffMessage) -> None:
        self.gate.wait(5.0)
        self.messages.append(message)

    def rows(self, ticket: str, slots: torch.Tensor, first_token: int = 0) -> None:
        """Feed the rows of both layers at ``slots``."""
        tokens = range(first_token, first_token + len(slots))
        self.feeder.rows(ticket, RowBlock(TARGET_KV, range(2), tokens), slots)

    def kinds(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.messages]


@contextmanager
def open_wire(checksums: bool = False, staging_timeout_s: float = 10.0) -> Iterator[Wire]:
    """Made, and ended."""
    made = Wire(checksums, staging_timeout_s)
    try:
        yield made
    finally:
        made.gate.set()
        made.sender.close(5.0)
        made.feeder.close(5.0)
