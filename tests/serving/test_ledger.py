"""What a node tells of its pool: free pages, and whether its books are whole."""

from __future__ import annotations

import pytest

from paceline.serving.ledger import PageLedger
from tests.fakes.nodes import node_config, sequence_request
from tests.fakes.runner import FakeRunner


def test_free_pages_are_those_that_no_live_sequence_holds() -> None:
    runner = FakeRunner(node_config(kv_cache_tokens=64, page_size=4))
    ledger = PageLedger(runner.runner, "decode")
    assert ledger.free_pages == 16
    first, second = (runner.new_sequence(sequence_request(num_prompt=20)) for _ in range(2))
    first.table.ensure(20)
    second.table.adopt(first.table.pages[:2])  # shared: held once
    second.table.ensure(20)
    ledger.count([first, second])
    assert ledger.free_pages == 16 - 8
    for seq in (first, second):
        seq.num_computed = 20
        runner.release(seq)
    assert runner.prefix is not None
    assert runner.prefix.num_pages > 0
    ledger.count([])
    assert ledger.free_pages == 16  # what the cache alone holds is for whoever comes


def test_books_are_checked_once_after_pages_moved(caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(node_config())
    ledger = PageLedger(runner.runner, "prefill")
    ledger.check()
    assert ledger.integrity == ""
    lost = runner.allocator.allocate(1)
    ledger.check()  # an idle node does not walk its pool again and again
    assert ledger.integrity == ""
    ledger.count([])
    ledger.check()
    assert str(lost[0].page) in ledger.integrity
    assert "KV pool of the prefill node" in caplog.text
    runner.allocator.release(lost)
    ledger.count([])
    ledger.check()
    assert ledger.integrity == ""


def test_a_page_that_the_cache_lost_is_noticed() -> None:
    runner = FakeRunner(node_config())
    ledger = PageLedger(runner.runner, "decode")
    seq = runner.new_sequence(sequence_request(num_prompt=20))
    seq.table.ensure(20)
    seq.num_computed = 20
    runner.release(seq)
    assert runner.prefix is not None
    runner.allocator.release(runner.prefix.pages[:1])
    ledger.check()
    assert ledger.integrity
