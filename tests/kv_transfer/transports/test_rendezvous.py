"""The rendezvous of a link: what one end sets the other gets, within bounds, and nothing waits for a dead peer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from kv_transfer.transports.rendezvous import MAX_KEYS, MAX_VALUE_BYTES, LinkStore, store_pair, torch_dist


def test_what_one_end_sets_the_other_gets_also_through_torch() -> None:
    prefill, decode = store_pair(2.0)
    torch_dist.PrefixStore("p", prefill).set("key", "value")
    assert decode.get("p/key") == b"value"
    assert torch_dist.PrefixStore("p", decode).get("key") == b"value"
    assert decode.check(["p/key"])
    assert not decode.check(["p/key", "other"])


def test_waits_end_with_the_key_with_the_time_and_with_the_stream() -> None:
    prefill, decode = store_pair(5.0)
    got: list[bytes] = []
    waiting = threading.Thread(target=lambda: got.append(decode.get("late")))
    waiting.start()
    prefill.set("late", b"\x00\xff")
    waiting.join(5)
    assert got == [b"\x00\xff"]
    with pytest.raises(RuntimeError, match="did not tell never within"):
        decode.wait(["never"], timedelta(seconds=0.02))
    threading.Timer(0.02, decode.close, ["control stream ended"]).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="control stream ended"):
        decode.get("never")
    assert time.monotonic() - began < 2.0


def test_a_peer_can_neither_fill_it_nor_change_what_is_there() -> None:
    store = LinkStore(lambda key, value: None, 1.0)
    store.set("mine", "here")
    with pytest.raises(ValueError, match="set twice"):
        store.receive("mine", b"there")
    assert store.get("mine") == b"here"
    with pytest.raises(ValueError, match="bytes"):
        store.receive("large", bytes(MAX_VALUE_BYTES + 1))
    for number in range(1, MAX_KEYS):
        store.receive(f"k{number}", b"")
    with pytest.raises(ValueError, match="keys already"):
        store.receive("one more", b"")
    assert store.num_keys() == MAX_KEYS
