"""Rows that cross encrypted: what arrives is what was sent, or the link ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kv_transfer.transports.base import MESSAGE_BYTES, Transport, TransportError, byte_view
from kv_transfer.transports.loopback import loopback_pair
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import store_pair
from kv_transfer.transports.sealed import PLAIN_BYTES, TAG_BYTES, SealedTransport

HOST, LINK = "127.0.0.1", "p0/d0/1"
SIZES = (0, 1, 1000, PLAIN_BYTES, PLAIN_BYTES + 1, MESSAGE_BYTES, 2 * MESSAGE_BYTES + 3, 7)
KEY = bytes(range(32))


@contextmanager
def gloo() -> Iterator[tuple[ThreadPoolExecutor, Transport, Transport]]:
    """A pool, and the ends of a pipe."""
    first, second = store_pair(5.0)
    with ThreadPoolExecutor(2) as pool:
        opening = pool.submit(open_transport, "gloo", first, LINK, 0, HOST, 5.0, sealed=True)
        decode = open_transport("gloo", second, LINK, 1, HOST, 5.0, sealed=True)
        prefill = opening.result(20)
        yield pool, prefill, decode
        prefill.close()
        decode.close()


def test_bytes_cross_gloo_in_several_pieces_under_way() -> None:
    """Mutants: a buffer that is given back before its bytes have left; messages that are larger than the pipe's."""
    with gloo() as (pool, prefill, decode):
        sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in SIZES]

        def send_all() -> None:
            for two in zip(sent[::2], sent[1::2], strict=True):
                for done in [prefill.start_send(tensor) for tensor in two]:
                    done()

        for _ in range(3):
            sending = pool.submit(send_all)
            got = [torch.zeros_like(tensor) for tensor in sent]
            for two in zip(got[::2], got[1::2], strict=True):
                for arrived in [decode.start_recv(tensor) for tensor in two]:
                    arrived()
            sending.result(10)
            assert all(torch.equal(mine, its) for mine, its in zip(got, sent, strict=True))


def test_more_bytes_than_are_waited_for_end_the_link_and_not_the_process() -> None:
    """Mutant: a receive waits for the bytes that were announced, and gloo ends this process."""
    with gloo() as (pool, prefill, decode):
        sending = pool.submit(prefill.send, torch.zeros(2000, dtype=torch.uint8))
        with pytest.raises(TransportError, match="not what the peer sealed"):
            decode.recv(torch.zeros(100, dtype=torch.uint8))
        sending.result(10)


def changed(messages: deque[Tensor]) -> None:
    messages[1][5] ^= 1


def repeated(messages: deque[Tensor]) -> None:
    messages[1] = messages[0]


def swapped(messages: deque[Tensor]) -> None:
    messages[0], messages[1] = messages[1], messages[0]


@pytest.mark.parametrize("attack", [changed, repeated, swapped])
def test_a_message_that_is_not_the_peers_ends_the_link(attack: Callable[[deque[Tensor]], None]) -> None:
    """Mutants: one number for all messages; a tag that nobody checks."""
    wire = loopback_pair()
    prefill, decode = (SealedTransport(end, KEY, LINK) for end in wire)
    rows = torch.randn(64, dtype=torch.bfloat16)
    for _ in range(3):
        prefill.send(rows)
    messages = wire[1]._pipe.messages
    assert all(message.numel() == rows.nbytes + TAG_BYTES for message in messages)
    assert not any(torch.equal(message[:-TAG_BYTES], byte_view(rows)) for message in messages)
    attack(messages)
    if attack is not swapped:
        decode.recv(torch.empty_like(rows))
    with pytest.raises(TransportError, match="not what the peer sealed"):
        decode.recv(torch.empty_like(rows))
    with pytest.raises(TransportError):
        decode.recv(torch.empty_like(rows))


def test_a_peer_that_tells_no_key_is_an_error() -> None:
    first, second = store_pair(0.5)
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(open_transport, "gloo", first, LINK, 0, HOST, 0.5)
        sealed = pool.submit(open_transport, "gloo", second, LINK, 1, HOST, 0.5, sealed=True)
        plain.result(10).close()
        with pytest.raises(TransportError, match="told no key"):
            sealed.result(10)
