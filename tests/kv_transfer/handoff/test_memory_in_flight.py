"""A link that dies gives no memory back that its transport may still read or write."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.transports.base import Pending, Rank, Transport, TransportError
from kv_transfer.transports.gloo import open_gloo
from kv_transfer.transports.loopback import loopback_pair
from kv_transfer.transports.rendezvous import store_pair
from kv_transfer.transports.sealed import sealed_end
from paceline.v1.handoff_pb2 import HandoffAck
from tests.support.handoff_link import FIRST, DictSink, raw_chunk, wait_for

TAKEN = 255  # what the next owner of a buffer writes


def gloo_pair(*, sealed: bool = False) -> tuple[Transport, Transport]:
    stores = store_pair(5.0)

    def end(rank: Rank) -> Transport:
        opened = open_gloo(stores[rank], "in-flight", rank, "127.0.0.1", 5.0, torch.device("cpu"))
        return sealed_end(opened, stores[rank], "in-flight", rank) if sealed else opened

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.map(end, get_args(Rank))
    return sending, receiving


@pytest.mark.parametrize("pair", [gloo_pair, partial(gloo_pair, sealed=True), partial(loopback_pair, 1)])
def test_no_peer_reads_a_buffer_that_was_given_back(pair: partial[tuple[Transport, Transport]]) -> None:
    """Three messages are started, and the peer takes none before a buffer comes back. Mutant: ``stop`` gives started
    messages back before the abort."""
    sending, receiving = pair()
    came: list[list[int]] = []
    gone: list[bool] = []

    def back(rows: Tensor) -> None:
        rows.fill_(TAKEN)
        gone.append(True)
        taken = torch.zeros(64, dtype=torch.uint8)
        try:
            receiving.recv(taken)
        except TransportError:
            return
        came.append(taken.tolist())

    sender = HandoffSender(
        sending, lambda message: None, on_ended=lambda *_: None, on_link_lost=lambda _: None, enqueue_timeout_s=5.0
    )
    sender.begin("t", range(FIRST, FIRST + 3))
    for i in range(3):
        rows = torch.full((64,), i, dtype=torch.uint8)
        block = RowBlock(TARGET_KV, range(1), range(FIRST + i, FIRST + i + 1))
        sender.chunk("t", block, rows, partial(back, rows))
    wait_for(lambda: gone or len(sender._pump._started) == 2, "messages that are started")
    sender.link_lost("pulled")
    assert sender.close(5)
    receiving.close()
    assert len(gone) == 3
    assert all(TAKEN not in bytes_ for bytes_ in came)


class Held(Transport):
    """Posted receives end when ``release`` is set, whatever is aborted."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.posted: list[Tensor] = []
        self.ended = 0

    def start_recv(self, tensor: Tensor) -> Pending:
        self.posted.append(tensor)

        def wait() -> None:
            assert self.release.wait(10)
            self.ended += 1
            raise TransportError("aborted")

        return wait

    def _send_message(self, data: Tensor) -> None:
        raise AssertionError("a receiver sends nothing")

    def _recv_message(self, data: Tensor) -> None:
        data.zero_()

    def close(self) -> None: ...

    def abort(self) -> None: ...


def test_a_receiver_ends_behind_the_receives_that_it_posted() -> None:
    """Its tickets fail at once: the transport writes into its buffers alone. Mutant: no ``settle``."""
    transport, sink, acks = Held(), DictSink(), list[HandoffAck]()
    receiver = HandoffReceiver(transport, sink, acks.append)
    sink.write_gate.clear()
    for _ in range(3):  # bytes of a ticket that nobody knows are thrown away; those behind are posted beside a write
        receiver.feed(raw_chunk("nobody", 8))
    known = sink.reserve("t")
    known.begin(range(FIRST, FIRST + 50), "", "")
    receiver._in_flight._handoffs["t"] = known
    num_bytes = 4 * 2 * 3 * 8 * 2
    for token in range(FIRST, FIRST + 12, 4):
        receiver.feed(raw_chunk("t", num_bytes, token))
    wait_for(lambda: len(transport.posted) == 2, "receives beside the write that is held")
    receiver.link_lost("pulled")
    sink.write_gate.set()
    wait_for(lambda: sink.failures, "the ticket's end")
    assert not receiver.close(0.05)
    transport.release.set()
    assert receiver.close(5)
    assert transport.ended == 2
