"""The rendezvous store: torch's store interface, bounded waits, one interface."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from kv_transfer.transports.base import TransportError
from kv_transfer.transports.rendezvous import MAX_KEYS, Store, create_store, torch_dist
from tests.support.open_files import left_beside, resources

HOST = "127.0.0.1"


@pytest.fixture
def stores() -> Iterator[tuple[Store, Store]]:
    master = create_store(HOST, 0, is_master=True, timeout_s=2)
    yield master, create_store(HOST, master.port, is_master=False, timeout_s=2)
    master.close()


def test_what_one_side_sets_the_other_gets(stores: tuple[Store, Store]) -> None:
    master, client = stores
    client.set("a", b"\x00\xff")
    master.set("b", "text")
    assert master.get("a") == b"\x00\xff"
    assert client.get("b") == b"text"
    assert client.check(["a", "b"])
    assert not client.check(["a", "c"])
    assert master.num_keys() == 2
    assert client.delete_key("a")
    assert not client.delete_key("a")
    client.set("b/1", "x")
    assert master.delete_prefix("b/") == 1
    assert master.num_keys() == 1


def test_counting_and_comparing(stores: tuple[Store, Store]) -> None:
    master, client = stores
    assert [master.add("n", 2), client.add("n", 3)] == [2, 5]
    assert client.compare_set("k", "", "first") == b"first"
    assert client.compare_set("k", "wrong", "second") == b"first"
    assert client.compare_set("k", "first", "second") == b"second"


def test_a_wait_ends_when_the_key_comes_and_delays_nobody(stores: tuple[Store, Store]) -> None:
    master, client = stores
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(client.get("late")))
    thread.start()
    client.set("other", "x")  # the same client, while a wait is under way
    assert client.get("other") == b"x"
    master.set("late", "here")
    thread.join(5)
    assert got == [b"here"]


def test_waits_are_bounded(stores: tuple[Store, Store]) -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="nobody set never"):
        stores[1].wait(["never"], timedelta(seconds=0.1))
    assert time.monotonic() - start < 2


def test_torch_can_use_it(stores: tuple[Store, Store]) -> None:
    prefixed = torch_dist.PrefixStore("p", stores[1])
    prefixed.set("key", "value")
    assert stores[0].get("p/key") == b"value"
    assert prefixed.get("key") == b"value"
    assert isinstance(stores[0], torch_dist.Store)
    assert dist.is_available()


def test_garbage_and_silence_harm_nobody(stores: tuple[Store, Store]) -> None:
    master, client = stores
    for noise in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"op": "drop", "key": "a"}\n', b'{"op": "set"}\n'):
        with socket.create_connection((HOST, master.port), timeout=5) as connection:
            connection.sendall(noise)
            assert b'"error"' in connection.recv(1000)
    silent = socket.create_connection((HOST, master.port), timeout=5)
    client.set("a", "b")
    assert client.get("a") == b"b"
    silent.close()


def test_the_number_of_keys_is_bounded(stores: tuple[Store, Store]) -> None:
    server = stores[0]._server
    assert server is not None
    server.table._values.update((f"k{i}", b"") for i in range(MAX_KEYS))
    with pytest.raises(RuntimeError, match="keys already"):
        stores[1].set("one more", "x")


def test_an_absent_server_is_an_error() -> None:
    master = create_store(HOST, 0, is_master=True, timeout_s=1)
    port = master.port
    master.close()
    with socket.socket() as held:  # does not listen, and keeps others from the port
        held.bind((HOST, port))
        with pytest.raises(TransportError, match=f"{HOST}:{port}"):
            create_store(HOST, port, is_master=False, timeout_s=1)
        with pytest.raises(RuntimeError):
            master.num_keys()


def test_a_taken_port_is_an_error(stores: tuple[Store, Store]) -> None:
    with pytest.raises(TransportError, match="in use"):
        create_store(HOST, stores[0].port, is_master=True, timeout_s=1)


def test_it_listens_on_the_given_host_alone(stores: tuple[Store, Store]) -> None:
    with open("/proc/self/net/tcp") as table:
        listening = [fields for line in table if (fields := line.split())[3] == "0A"]
    port = f"{stores[0].port:04X}"
    assert {fields[1] for fields in listening if fields[1].endswith(port)} == {f"0100007F:{port}"}


def test_a_dropped_store_leaves_nothing_behind() -> None:
    held = resources()
    store = create_store(HOST, 0, is_master=True, timeout_s=1)
    assert resources() - held
    store.close()
    del store
    assert left_beside(held) == set()
    store = create_store(HOST, 0, is_master=True, timeout_s=1)
    del store
    assert left_beside(held) == set()
