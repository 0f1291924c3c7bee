"""Rows of a hand-off land on a GPU while its engine computes: the link's thread waits for no step of the model."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from decode_node.sink import ReservedPages
from decode_node.stream import HiddenRows
from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.transports.side_stream import held_work, own_stream
from tests.support.device_runner import DEVICES, device_runner

BUSY_CYCLES = 4_000_000_000  # some two seconds of an engine's kernel
TIMEOUT_S = 60.0


@pytest.mark.parametrize("device", DEVICES)
def test_rows_land_beside_a_step(device: str) -> None:
    runner = device_runner(device)
    num_tokens = runner.page_size
    slots = torch.arange(num_tokens, dtype=torch.int32)
    refs = runner.allocator.allocate(1)
    landing = SimpleNamespace(
        pages=tuple(refs),
        slots=slots + refs[0].page * runner.page_size,
        hidden=HiddenRows(0, num_tokens),
        free=held_work(runner.kv.device),
    )
    told: list[str] = []
    sink = ReservedPages(
        runner,
        cast("Any", {"t": SimpleNamespace(landing=landing)}),
        lambda *_: None,
        lambda ticket, why: told.append(why),
    )
    layers = range(len(runner.kv.layout.layers))
    before = runner.kv.gather(layers, landing.slots)
    runner.kv.scatter(layers, landing.slots, before)  # a kernel's first launch, which loads it, waits for the device
    rows = torch.randn_like(before)

    def land() -> None:
        with own_stream(runner.kv.device):
            sink.write_kv("t", RowBlock(TARGET_KV, layers, range(num_tokens)), rows)
            sink.failed("t", "landed")

    step: torch.cuda.Event | None = None
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
        step = held_work(runner.kv.device)
    thread = threading.Thread(target=land)
    thread.start()
    thread.join(TIMEOUT_S)
    assert told == ["landed"]
    assert step is None or not step.query()  # type: ignore[no-untyped-call]
    assert torch.equal(runner.kv.gather(layers, landing.slots), rows)
