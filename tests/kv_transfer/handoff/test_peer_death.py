"""The peer process is killed: the sentinel tells, buffers stay quarantined, and a new link works."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.state import Handoff, HandoffState
from kv_transfer.transports.base import Rank, Transport, TransportError, byte_view
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.sentinel import Sentinel
from kv_transfer.transports.torch_dist import TorchDistTransport
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import Begin, Chunk, HandoffAck, HandoffMessage, State
from tests.kv_transfer.handoff.peer_process import send_slowly

torch.set_num_threads(1)
HOST = "127.0.0.1"
MESSAGE_TIMEOUT_S = 3.0
TOKENS = 32768
LAYOUT = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, 4, 128),), torch.float32)  # 4 KiB a token
NUM_BYTES = TOKENS * 4096  # 128 MiB: far more than the socket buffers between two processes hold
_link_ids = (f"p0/d0/{i}" for i in itertools.count())


@pytest.fixture(autouse=True)
def one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large a chunk is."""
    monkeypatch.setattr("kv_transfer.handoff.cut.MESSAGE_BYTES", NUM_BYTES)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.001)


class WholeMessage(Transport):
    """Sends and receives a tensor as one message, so that there is a middle to be killed in."""

    def __init__(self, inner: TorchDistTransport) -> None:
        self._inner = inner
        self.returned = threading.Event()

    def send(self, tensor: Tensor) -> None:
        self._call(self._inner._send_message, tensor)

    def recv(self, tensor: Tensor) -> None:
        self._call(self._inner._recv_message, tensor)

    def _call(self, call: Callable[[Tensor], None], tensor: Tensor) -> None:
        try:
            call(byte_view(tensor))
        finally:
            self.returned.set()

    def _send_message(self, data: Tensor) -> None:
        raise AssertionError("not used")

    def _recv_message(self, data: Tensor) -> None:
        raise AssertionError("not used")

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class Peer:
    """The other process and this process's end of the link to it."""

    def __init__(self, store: Path, rank: int, behaviour: str, num_bytes: int = NUM_BYTES) -> None:
        self._store = torch_dist.FileStore(str(store))
        self._link_id = next(_link_ids)
        self._my_rank = 1 - rank
        script = str(Path(__file__).with_name("peer_process.py"))
        arguments = [str(store), self._link_id, str(rank), behaviour, str(num_bytes)]
        self.process = subprocess.Popen([sys.executable, script, *arguments])
        self.lost: list[str] = []

    def open(self, on_lost: Callable[[str], None]) -> tuple[TorchDistTransport, Sentinel]:
        def lost(reason: str) -> None:
            self.lost.append(reason)
            on_lost(reason)

        rank: Rank = 1 if self._my_rank else 0
        self._store.wait([f"{self._link_id}.ready"], timedelta(seconds=60))  # python and torch have started
        transport = open_transport("gloo", self._store, self._link_id, rank, HOST, MESSAGE_TIMEOUT_S)
        assert isinstance(transport, TorchDistTransport)
        return transport, Sentinel(self._store, self._link_id, rank, HOST, MESSAGE_TIMEOUT_S, lost)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, for a store that processes share."""
    return tmp_path_factory.mktemp("store") / "keys"


@pytest.fixture
def start(store: Path) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start_peer(rank: int, behaviour: str, num_bytes: int = NUM_BYTES) -> Peer:
        peers.append(Peer(store, rank, behaviour, num_bytes))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.kill()


class Sink:
    def __init__(self) -> None:
        expected = ExpectedRows(LAYOUT, range(TOKENS), 8)
        self.handoff = Handoff("t", time.monotonic, expected, reserve_deadline_s=60, handoff_deadline_s=60)
        self.failures: list[tuple[str, str]] = []
        self.writes = 0

    def lookup(self, ticket: str) -> Handoff:
        return self.handoff

    def write_kv(self, *where: object) -> None:
        self.writes += 1

    def ready(self, ticket: str, state: State, hidden: Tensor) -> None:
        raise AssertionError("a hand-off whose sender died became ready")

    def failed(self, ticket: str, reason: str) -> None:
        self.failures.append((ticket, reason))


def test_a_peer_killed_while_idle_is_told_and_a_new_link_works(start: Callable[..., Peer]) -> None:
    peer, successor = start(0, "idle"), start(0, "whole", 10_000_000)
    transport, sentinel = peer.open(lambda reason: None)
    assert peer.lost == []
    peer.kill()
    wait_for(lambda: peer.lost, "the sentinel", 5)
    with pytest.raises(TransportError):
        transport.recv(torch.zeros(1))
    sentinel.close()
    transport.close()

    transport, sentinel = successor.open(lambda reason: None)
    got = torch.zeros(10_000_000, dtype=torch.uint8)
    transport.recv(got)
    assert bool((got == 1).all())
    assert successor.process.wait(20) == 0
    sentinel.close()
    transport.close()
    assert len(peer.lost) == 1
    assert successor.lost == []


def test_a_sender_killed_in_mid_message_leaves_the_pages_quarantined(start: Callable[..., Peer]) -> None:
    peer = start(0, "freeze")
    sink = Sink()
    links: list[HandoffReceiver] = []
    transport, sentinel = peer.open(lambda reason: links[0].link_lost(reason))
    whole = WholeMessage(transport)
    receiver = HandoffReceiver(whole, sink, lambda ack: None)
    links.append(receiver)
    buffer = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    receiver._intake._staging._free.append(buffer)
    receiver.feed(HandoffMessage(ticket="t", begin=Begin(first_token=0, num_tokens=TOKENS)))
    chunk = Chunk(byte_class=TARGET_KV, num_layers=1, num_tokens=TOKENS, num_bytes=NUM_BYTES)
    receiver.feed(HandoffMessage(ticket="t", chunk=chunk))

    wait_for(lambda: buffer[0] == 1, "the first byte")
    peer.kill()
    assert buffer[-1] == 0, "the message was complete before the kill"
    wait_for(lambda: peer.lost, "the sentinel", 5)
    assert not whole.returned.is_set()
    wait_for(lambda: not receiver.alive, "the loss at the receiver")
    assert receiver.draining == ("t",)
    assert sink.failures == []
    wait_for(lambda: sink.failures, "the failure")
    assert whole.returned.is_set()
    assert "is gone" in sink.failures[0][1]
    assert sink.handoff.status is HandoffState.FAILED
    assert sink.writes == 0
    assert receiver.close(5)
    sentinel.close()


def test_a_receiver_killed_in_mid_message_leaves_the_source_quarantined(start: Callable[..., Peer]) -> None:
    peer = start(1, "freeze")
    failed: list[str] = []
    links: list[HandoffSender] = []
    transport, sentinel = peer.open(lambda reason: links[0].link_lost(reason))
    whole = WholeMessage(transport)

    def on_ended(ticket: str, end: HandoffAck | str) -> None:
        failed.append(ticket if isinstance(end, str) else f"{ticket} was acknowledged by a dead peer")

    sender = HandoffSender(
        whole,
        lambda message: None,
        on_ended=on_ended,
        on_link_lost=lambda reason: None,
        max_queued_bytes=2 * NUM_BYTES,
    )
    links.append(sender)
    send_slowly()  # so that the peer, too, is in the midst of the message for seconds
    sender.begin("waiting", range(TOKENS))
    sender.begin("on wire", range(TOKENS))
    sender.chunk("on wire", RowBlock(TARGET_KV, range(1), range(TOKENS)), torch.ones(NUM_BYTES, dtype=torch.uint8))
    status = Path(f"/proc/{peer.process.pid}/stat")
    wait_for(lambda: status.read_text().split()[2] == "T", "the stop in mid-message")
    peer.kill()
    wait_for(lambda: peer.lost, "the sentinel", 5)
    wait_for(lambda: failed, "the failure of the ticket that is not on the wire")
    assert not whole.returned.is_set()
    assert failed == ["waiting"]
    wait_for(lambda: len(failed) == 2, "the failure of the ticket on the wire")
    assert whole.returned.is_set()
    assert sender.close(5)
    sentinel.close()
