"""Where a GPU's pool is filled: on a stream of the link's own, behind the engine's use of the pages, done before told.

A CPU has no streams. The calls are recorded in the order in which the receiver's thread makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import kv_transfer.transports.side_stream as side_stream
from decode_node.sink import ReservedPages
from decode_node.stream import HiddenRows
from kv_transfer.handoff import receiver
from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.transports.side_stream import held_work, own_stream
from paceline.assembly.build import device_kernels
from paceline.attention.flashinfer import FlashInferAttention
from paceline.triton_support import has_triton
from paceline.v1 import handoff_pb2
from prefill_node import feeder
from tests.support.tiny_model import tiny_runner

CUDA = torch.device("cuda:0")


class Streams:
    """Stands in for torch.cuda: remembers what was asked of which stream."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "engine"

    def stream(self, name: str) -> Any:
        def wait_event(event: Any) -> None:
            self.calls.append(f"{name} waits for {event.behind}")

        return SimpleNamespace(
            name=name, wait_event=wait_event, synchronize=lambda: self.calls.append(f"{name} is done")
        )

    def event(self) -> Any:
        event = SimpleNamespace(behind="")
        event.record = lambda stream: setattr(event, "behind", stream.name)
        return event

    @contextmanager
    def inside(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    cuda = SimpleNamespace(
        Stream=lambda device: streams.stream("link"),
        Event=streams.event,
        current_stream=lambda device: streams.stream(streams.current),
        stream=streams.inside,
        device=lambda device: streams.inside(streams.stream(streams.current)),
    )
    monkeypatch.setattr(side_stream, "torch", SimpleNamespace(cuda=cuda))
    return streams


@pytest.fixture
def sink(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> tuple[ReservedPages, Callable[[], None]]:
    """A sink over a tiny pool that says that it lies on a GPU, and what writes rows of a ticket into it."""
    runner = tiny_runner("fp32")
    refs = runner.allocator.allocate(1)
    free = held_work(CUDA)  # on the engine's thread, when the pages were reserved
    landing = SimpleNamespace(
        pages=tuple(refs), slots=torch.arange(4, dtype=torch.int32), hidden=HiddenRows(0, 4), free=free
    )
    pages = ReservedPages(
        runner,
        cast("Any", {"t": SimpleNamespace(landing=landing)}),
        lambda *told: streams.calls.append("ready"),
        lambda *told: streams.calls.append("failed"),
    )
    monkeypatch.setattr(pages, "_runner", _on(runner, CUDA))
    monkeypatch.setattr(pages._target, "scatter", lambda *rows: streams.calls.append(f"{streams.current} writes"))

    def write() -> None:
        pages.write_kv("t", RowBlock(TARGET_KV, range(1), range(2)), torch.zeros(0))

    return pages, write


def _on(runner: Any, device: torch.device) -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(device=device), page_size=16, allocator=runner.allocator, vocab_size=runner.vocab_size
    )


def test_rows_wait_for_the_engine_and_are_there_before_anyone_hears(
    streams: Streams, sink: tuple[ReservedPages, Callable[[], None]]
) -> None:
    """Mutants: the engine's stream; no wait for who used the pages last; told while writes are queued."""
    pages, write = sink
    with own_stream(CUDA):
        write()
        pages.failed("t", "why")
    assert streams.calls == ["link waits for engine", "link writes", "link is done", "failed"]


def test_a_ready_hand_off_is_complete(
    streams: Streams, sink: tuple[ReservedPages, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, write = sink
    hidden = SimpleNamespace(to=lambda device: SimpleNamespace(is_cuda=False))
    with own_stream(CUDA):
        write()
        pages.ready("t", handoff_pb2.State(first_token_id=1), cast("Any", hidden))
    assert streams.calls[-2:] == ["link is done", "ready"]


@pytest.mark.parametrize(
    ("pool", "wire", "locked"), [("cuda:0", "cpu", True), ("cuda:0", "cuda:0", False), ("cpu", "cpu", False)]
)
def test_host_memory_beside_a_gpu_is_page_locked(
    pool: str, wire: str, locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At both ends of a link. Mutant: pageable memory, which the device copies at half the speed, and waits."""

    class Seen(Exception):
        pass

    def staging(*_: object, pinned: bool, num_bytes: int = 0) -> None:
        raise Seen(pinned)

    monkeypatch.setattr(receiver, "Staging", staging)
    monkeypatch.setattr(feeder, "StagingRing", staging)
    source: Any = SimpleNamespace(device=torch.device(pool))
    end: Any = SimpleNamespace(multiple=1)  # a sender, a transport
    with pytest.raises(Seen, match=str(locked)):
        feeder.RowFeeder(end, source, torch.device(wire), lambda *_: None)
    with pytest.raises(Seen, match=str(locked)):
        receiver.HandoffReceiver(end, cast("Any", None), lambda *_: None, device=wire, pool_device=torch.device(pool))


def test_kernels_of_a_device_do_not_name_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of one kind pair whatever their hosts are; FlashInfer and the reference do not pair, nor unlike bits."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9, minor=0))
    attention = FlashInferAttention(torch.device("cpu"), 64, cast("Any", SimpleNamespace(__version__="0.7.2")))
    found = device_kernels(CUDA, attention, "fast")
    assert found == f"sm_90/torch {torch.__version__}/{attention.kernels}"
    assert attention.kernels.startswith("flashinfer 0.7.2 and t")
    if has_triton():
        assert device_kernels(CUDA, attention, "exact") != found
