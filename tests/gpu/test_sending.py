"""Rows leave a GPU once they are computed: a link's sending end marks them behind the work that fills them."""

from __future__ import annotations

import threading

import pytest
import torch

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.outbox import Payload
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.transports.base import Pending, Transport
from tests.support.device_runner import DEVICES, GPU

BUSY_CYCLES = 2_000_000_000  # some second of an engine's kernel
TIMEOUT_S = 60.0
ROWS = RowBlock(TARGET_KV, range(1), range(8))


class Copies(Transport):
    """Moves a message as the paths of a GPU do: the stream on which it starts reads the bytes, and nobody waits."""

    def __init__(self, landing: torch.Tensor) -> None:
        """landing: memory that is there already, because taking some may wait for the device."""
        self.landing = landing

    def start_send(self, tensor: torch.Tensor) -> Pending:
        self.landing.copy_(tensor)
        return lambda: None

    def _send_message(self, data: torch.Tensor) -> None:
        raise AssertionError("messages are started")

    def _recv_message(self, data: torch.Tensor) -> None:
        raise AssertionError("a sender receives nothing")

    def close(self) -> None: ...

    def abort(self) -> None: ...


def rows_on(device: str) -> torch.Tensor:
    """Zeros. What the test does with them has run once, on another stream too: a first time may wait for the device."""
    rows = torch.ones(64, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):  # type: ignore[no-untyped-call]
        rows.copy_(rows.clone())
    return rows.fill_(0)


def busy() -> None:
    """The engine has a second of work on the current stream."""
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_leave_behind_the_kernel_that_fills_them(device: str) -> None:
    """Mutant, seen on a device alone: `Payload.of` records no event, and zeros leave."""
    wire, rows, done = Copies(rows_on(device)), rows_on(device), threading.Event()
    sender = HandoffSender(
        wire, lambda message: None, on_ended=lambda ticket, end: None, on_link_lost=lambda reason: None
    )
    sender.begin("t", ROWS.tokens)
    if device == "cuda":
        busy()
    rows.fill_(7)
    sender.chunk("t", ROWS, rows, done.set)
    assert done.wait(TIMEOUT_S)
    assert sender.close(TIMEOUT_S)
    assert wire.landing.tolist() == [7] * 64


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
def test_a_payload_is_produced_when_its_kernel_is_done(device: str) -> None:
    """An event that was never recorded says that it has happened."""
    rows = rows_on(device)
    busy()
    rows.fill_(7)
    produced = Payload.of(rows).produced
    assert produced is not None
    assert not produced.query()  # type: ignore[no-untyped-call]
    produced.synchronize()
    assert rows.tolist() == [7] * 64
