"""Whole hand-offs between two processes: by NCCL and by gloo on one GPU, by gloo on CPU. Then the peer is killed.

NCCL refuses two ranks on one device of one host, so each process says that it is a host of its own (NCCL_HOSTID).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.sentinel import Sentinel
from paceline.engine.model_runner import ModelRunner
from paceline.errors import HandoffFailed
from paceline.layers.build import load_kernels
from paceline.request import SequenceRequest
from paceline.v1.handoff_pb2 import HandoffMessage
from tests.support.device_runner import GPU, NARROW, answers, device_runner, mixed_requests, texts, write_heads
from tests.support.needs import NO_KERNELS
from tests.support.prefill_peer import HOST, NCCL_ENVIRONMENT, PrefillPeer
from tests.support.two_engines import WAIT_S, Decode

pytestmark = pytest.mark.timeout(400)
PATHS = [  # data path, device
    pytest.param("gloo", "cpu", id="gloo-cpu"),
    pytest.param("gloo", "cuda", id="gloo-cuda", marks=GPU),
    pytest.param("nccl", "cuda", id="nccl", marks=GPU),
]
MESSAGE_TIMEOUT_S = 5.0
_link_ids = (f"p0/d0/epoch-{i}" for i in itertools.count())


@pytest.fixture(scope="module", autouse=True)
def a_host_of_its_own() -> Iterator[None]:
    """This process is rank 1 of every link; NCCL reads these once, at its first call."""
    before = dict(os.environ)
    os.environ.update(NCCL_ENVIRONMENT | {"NCCL_HOSTID": "decode"})
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file, for a store that processes share."""
    return str(tmp_path_factory.mktemp("store") / "keys")


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    heads = write_heads(tmp_path_factory.mktemp("heads"), NARROW)
    return {"drafter": "eagle3", "drafter_path": str(heads / "eagle3")}


class PeerLink:
    """A link to a prefill process of its own."""

    def __init__(self, store: str, decode: Decode, backend: str, device: str, behaviour: str, **runner: object) -> None:
        self.decode = decode
        keys = torch_dist.FileStore(store)
        self.lost: list[str] = []
        self.told = threading.Event()
        link_id = next(_link_ids)
        self.peer = PrefillPeer(
            {
                "store": store,
                "link_id": link_id,
                "backend": backend,
                "device": device,
                "behaviour": behaviour,
                "timeout_s": MESSAGE_TIMEOUT_S if backend == "gloo" else WAIT_S,
                "geometry": NARROW,
                "runner": {"page_size": 16, **runner},
            }
        )
        place = torch.device(device if backend == "nccl" else "cpu")
        timeout_s = MESSAGE_TIMEOUT_S if backend == "gloo" else WAIT_S
        self.transport = open_transport(
            "nccl" if backend == "nccl" else "gloo", keys, link_id, 1, HOST, timeout_s, place
        )
        self.receiver = decode.attach(self.transport, self._ack, link_id, place)
        self.sentinel = Sentinel(keys, link_id, 1, HOST, timeout_s, self._on_lost)
        self.peer.start(lambda message: self.receiver.feed(HandoffMessage.FromString(message)))

    def _ack(self, ack: object) -> None:
        self.peer.acknowledge(ack.SerializeToString())  # type: ignore[attr-defined]

    def _on_lost(self, reason: str) -> None:
        self.lost.append(reason)
        self.told.set()
        self.receiver.link_lost(reason)

    def generate(self, asked: list[SequenceRequest]) -> list[list[int]]:
        """All at once; what each prompt was when it left must be what landed."""
        streams = [self.decode.submit(request) for request in asked]
        for request, (stream, _, cached) in zip(asked, streams, strict=True):
            self.peer.prefill(request, stream.ticket, cached)
        rest = [self.decode.finish(events) for _, events, _ in streams]
        firsts = dict(self.peer.first_tokens.get(timeout=WAIT_S) for _ in asked)
        sent = dict(self.peer.digests.get(timeout=WAIT_S) for _ in asked)
        assert sent == {stream.ticket: self.decode.landed[stream.ticket] for stream, _, _ in streams}
        return [[firsts[stream.ticket], *tokens] for (stream, _, _), tokens in zip(streams, rest, strict=True)]

    def close(self) -> None:
        if self.peer.process.poll() is None:
            assert self.peer.stop() == 0
        assert self.receiver.close(10)
        self.sentinel.close()


def decode_runner(device: str, options: dict[str, object]) -> ModelRunner:
    return device_runner(device, NARROW, page_size=8, **options)


def expected(device: str) -> list[list[int]]:
    return texts(answers(device_runner(device, NARROW, drafter="none"), mixed_requests(), batch=1))


@pytest.mark.parametrize(("backend", "device"), PATHS)
def test_pools_and_texts_are_equal(backend: str, device: str, store: str, drafting: dict[str, object]) -> None:
    decode = Decode(decode_runner(device, drafting))
    link = PeerLink(store, decode, backend, device, "serve", **drafting)
    try:
        assert link.generate(mixed_requests()) == expected(device)
        assert decode.engine.missing_drafts == 0
    finally:
        link.close()
        decode.close()


@pytest.mark.parametrize(("backend", "device"), PATHS)
def test_a_peer_killed_in_mid_transfer(backend: str, device: str, store: str, drafting: dict[str, object]) -> None:
    """The survivor fails that request alone, serves others on the same device, and takes a new link at once."""
    if device == "cpu" and load_kernels() is None:
        pytest.skip(NO_KERNELS)
    # One prompt is found where it was computed alone, and its bits are compared: they are not promised by default.
    drafting = drafting | {"bits": "exact"}
    decode = Decode(decode_runner(device, drafting))
    asked = mixed_requests()
    link = PeerLink(store, decode, backend, device, "hang", **drafting)
    stream, events, cached = decode.submit(asked[0])
    link.peer.prefill(asked[0], stream.ticket, cached)
    assert link.peer.hanging.wait(WAIT_S)  # a chunk is announced, and the receiver waits for bytes that never come
    link.peer.kill()
    with pytest.raises(HandoffFailed, match=f"hand-off {stream.ticket} failed"):
        decode.finish(events)
    assert link.told.wait(WAIT_S)
    assert len(link.lost) == 1
    link.close()
    assert not link.receiver.draining

    local = decode.submit(asked[1], local_prefill=True)
    assert decode.finish(local[1]) == expected(device)[1]
    successor = PeerLink(store, decode, backend, device, "serve", **drafting)
    try:
        assert successor.generate(asked) == expected(device)
        if device == "cuda":
            assert torch.ones(8, device=device).sum().item() == 8
    finally:
        successor.close()
        decode.close()
