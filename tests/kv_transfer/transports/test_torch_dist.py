"""Real gloo between two ends in one process: bytes, orderly ends, timeouts, and nothing left behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

from kv_transfer.transports.base import MESSAGE_BYTES, TransportError, byte_view
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import LinkStore, store_pair
from kv_transfer.transports.sentinel import Sentinel
from kv_transfer.transports.torch_dist import TorchDistTransport
from paceline.errors import ConfigError
from tests.support.open_files import left_beside, resources

torch.set_num_threads(1)
HOST = "127.0.0.1"
_link_ids = (f"p0/d0/{i}" for i in itertools.count())


@dataclass
class End:
    transport: TorchDistTransport
    sentinel: Sentinel
    lost: list[str] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)


def open_end(store: LinkStore, link_id: str, rank: int, timeout_s: float) -> End:
    transport = open_transport("gloo", store, link_id, 1 if rank else 0, HOST, timeout_s)
    assert isinstance(transport, TorchDistTransport)
    lost: list[str] = []
    closed = threading.Event()
    sentinel = Sentinel(store, link_id, 1 if rank else 0, HOST, timeout_s, lost.append, closed.set)
    return End(transport, sentinel, lost, closed)


def open_pair(timeout_s: float = 5.0) -> tuple[End, End]:
    link_id, stores = next(_link_ids), store_pair(timeout_s)
    with ThreadPoolExecutor(2) as pool:
        prefill, decode = (pool.submit(open_end, stores[rank], link_id, rank, timeout_s) for rank in (0, 1))
        return prefill.result(20), decode.result(20)


def close_pair(ends: tuple[End, End]) -> None:
    for end in ends:
        end.sentinel.close()
        end.transport.close()


@pytest.fixture
def link() -> Iterator[tuple[End, End]]:
    ends = open_pair()
    yield ends
    close_pair(ends)


def test_bytes_arrive_unchanged_and_in_order(link: tuple[End, End]) -> None:
    prefill, decode = link
    sizes = [0, 1, 1000, MESSAGE_BYTES // 4, MESSAGE_BYTES // 2 + 3, 0, 3 * MESSAGE_BYTES // 4 + 1]
    sent = [torch.randn(n).to(dtype) for n in sizes for dtype in (torch.bfloat16, torch.float32)]

    def send_all() -> None:
        for tensor in sent:
            prefill.transport.send(tensor)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send_all)
        for tensor in sent:
            got = torch.empty_like(tensor)
            decode.transport.recv(got)
            assert torch.equal(byte_view(got), byte_view(tensor))
        sending.result(10)


def test_an_orderly_end_is_told_as_such(link: tuple[End, End]) -> None:
    prefill, decode = link
    prefill.sentinel.close()
    assert decode.closed.wait(5)
    decode.sentinel.close()
    assert prefill.lost == decode.lost == []
    assert not prefill.closed.is_set()


def test_both_ends_may_close_at_once() -> None:
    for _ in range(10):
        ends = open_pair()
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda end: end.sentinel.close(20.0), ends))
        assert time.monotonic() - start < 10  # nobody waited for the other until the timeout
        assert ends[0].lost == ends[1].lost == []
        close_pair(ends)


def test_a_receive_without_a_sender_times_out_and_the_link_is_dead() -> None:
    ends = open_pair(timeout_s=2.0)  # to join, too
    start = time.monotonic()
    with pytest.raises(TransportError, match="recv of 4 bytes failed"):
        ends[1].transport.recv(torch.zeros(1))
    assert time.monotonic() - start < 10
    with pytest.raises(TransportError):
        ends[1].transport.recv(torch.zeros(1))
    with pytest.raises(TransportError):
        ends[0].transport.send(torch.zeros(MESSAGE_BYTES))
    assert ends[0].lost == ends[1].lost == []  # the sentinel outlives the data group
    close_pair(ends)


def test_a_send_without_a_receiver_times_out() -> None:
    ends = open_pair(timeout_s=2.0)  # to join, too
    with pytest.raises(TransportError, match="send of"):
        ends[0].transport.send(torch.zeros(MESSAGE_BYTES))
    close_pair(ends)


@pytest.mark.parametrize("aborting", [0, 1])
def test_abort_at_either_end_wakes_a_receive_between_messages(aborting: int) -> None:
    ends = open_pair(timeout_s=30)
    timer = threading.Timer(0.1, ends[aborting].transport.abort)
    timer.start()
    start = time.monotonic()
    with pytest.raises(TransportError):
        ends[1].transport.recv(torch.zeros(1))
    assert time.monotonic() - start < 10
    timer.join()
    close_pair(ends)


def test_links_of_one_process_are_independent() -> None:
    one, two = open_pair(), open_pair()
    one[0].transport.abort()
    with ThreadPoolExecutor(1) as pool:
        sent, got = torch.randn(100), torch.zeros(100)
        sending = pool.submit(two[0].transport.send, sent)
        two[1].transport.recv(got)
        sending.result(5)
    assert torch.equal(sent, got)
    close_pair(one)
    close_pair(two)


def test_an_absent_peer_is_an_error() -> None:
    start = time.monotonic()
    with pytest.raises(TransportError, match="did not join"):
        open_transport("gloo", store_pair(0.3)[1], next(_link_ids), 1, HOST, 0.3)
    assert time.monotonic() - start < 10


def test_thirty_links_leave_nothing_behind() -> None:
    close_pair(open_pair())
    held = resources()
    for _ in range(30):
        ends = open_pair()
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(ends[0].transport.send, torch.ones(10))
            ends[1].transport.recv(torch.zeros(10))
            sending.result(5)
        close_pair(ends)
        del ends
    assert left_beside(held) == set()


def test_aborted_links_leave_nothing_behind() -> None:
    close_pair(open_pair())
    held = resources()
    for _ in range(5):
        ends = open_pair()
        ends[0].transport.abort()
        close_pair(ends)
        del ends
    assert left_beside(held) == set()


@pytest.mark.skipif(dist.is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_is_refused_by_name_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match="transport: nccl is not in this build"):
        open_transport("nccl", store_pair(1.0)[0], next(_link_ids), 0, HOST, 1.0)
