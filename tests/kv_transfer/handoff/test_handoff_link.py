"""Sender and receiver over the loopback transport: bytes, counters, aborts and cancels."""

from __future__ import annotations

import time

import pytest
import torch

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV
from kv_transfer.handoff.state import HandoffState
from paceline.errors import HandoffFailed
from paceline.v1.handoff_pb2 import Begin as BeginMessage
from paceline.v1.handoff_pb2 import Cancelled, HandoffAck, HandoffMessage, Hello, Ready, State
from tests.support.handoff_link import (
    FIRST,
    HIDDEN_SIZE,
    NUM,
    TARGET,
    TOKENS,
    Prompt,
    jam,
    narrow_window,
    open_link,
    raw,
    raw_chunk,
    wait_for,
)

torch.set_num_threads(1)


def test_bytes_and_counters() -> None:
    with open_link() as link:
        prompts = {f"t{i}": Prompt(i) for i in range(3)}
        for ticket, prompt in prompts.items():
            link.sink.reserve(ticket)
            link.hand_over(ticket, prompt)
        wait_for(lambda: len(link.terminal) == 3, "three acknowledgements")
        assert link.terminal == [(ticket, "ready") for ticket in prompts]
        for ticket, prompt in prompts.items():
            link.check_rows(ticket, prompt)
            state, hidden = link.sink.ready_states[ticket]
            assert (state.first_token_id, state.num_hidden_rows) == (7, 1)
            assert torch.equal(hidden, prompt.hidden)
            meta = sum(message.ByteSize() for message in link.posted if message.ticket == ticket)
            # algorithms.md H4: layers * elements of a row * bytes of an element, for every token.
            expected = {
                TARGET_KV: NUM * (2 * 2 * 3 * 8 + 24) * 2,
                DRAFT_KV: NUM * 2 * 2 * 2 * 8 * 2,
                HIDDEN: HIDDEN_SIZE * 2,
                META: meta,
            }
            assert link.sender.bytes_sent(ticket) == expected
            assert link.sink.handoffs[ticket].bytes_by_class == expected
            assert link.sink.handoffs[ticket].status is HandoffState.READY
            assert link.sink.handoffs[ticket].link_id == "link"


def test_a_state_without_hidden_rows() -> None:
    with open_link() as link:
        link.sink.reserve("t", num_tokens=0)
        link.sender.begin("t", range(FIRST, FIRST))
        link.sender.state("t", State(first_token_id=1))
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        assert link.sink.ready_states["t"][1].shape == (0, HIDDEN_SIZE)


def test_hello_is_accepted() -> None:
    with open_link() as link:
        link.receiver.feed(HandoffMessage(hello=Hello(link_id="link")))
        wait_for(lambda: bool(link.acks), "the answer to Hello")
        assert [ack.WhichOneof("body") for ack in link.acks] == ["hello"]


def test_abort_midway() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        link.put("t", Prompt(0), range(0, 2), range(16, 40))
        wait_for(lambda: len(link.posted) == 2, "Begin and the chunk")
        link.sender.abort("t", "prefill gave up")
        link.sender.abort("t", "again")
        assert link.failure("t") == "prefill gave up"
        assert link.terminal == [("t", "failed")]
        with pytest.raises(HandoffFailed, match="not open"):
            link.put("t", Prompt(0), range(2, 3), range(16, 40))
        link.check_still_works()


def test_abort_before_anything_was_sent() -> None:
    with narrow_window(), open_link() as link:
        jam(link)
        handoff = link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        link.sender.abort("t", "changed its mind")
        link.sink.write_gate.set()
        wait_for(lambda: link.terminal == [("t", "failed")], "the end of the aborted ticket")
        assert [m.WhichOneof("body") for m in link.posted if m.ticket == "t"] == ["abort"]
        # It never began on this link: the decode node gives the reservation up itself.
        assert handoff.fail_reserved("aborted")


def test_cancel_midway() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        link.put("t", Prompt(0), range(0, 2), range(16, 40))
        written = 2 * 24
        wait_for(lambda: len(link.sink.rows) == written, "the rows of the first chunk")
        assert link.receiver.cancel("t")
        assert link.failure("t") == "cancelled"
        assert [ack.WhichOneof("body") for ack in link.acks] == ["cancelled", "failed"]
        assert link.posted[-1].WhichOneof("body") == "abort"
        assert len(link.sink.rows) == written
        assert not link.receiver.cancel("t")
        link.check_still_works()


def test_chunks_after_a_cancel_are_dropped_and_an_abort_takes_their_place() -> None:
    with narrow_window(), open_link() as link:
        jam(link)
        link.sender.begin("t", TOKENS)
        link.put("t", Prompt(0), TARGET, range(16, 40))
        link.sender.acknowledge(HandoffAck(ticket="t", cancelled=Cancelled()))
        link.put("t", Prompt(0), TARGET, range(40, 66))
        link.sender.state("t", State())
        link.sink.write_gate.set()
        wait_for(lambda: link.terminal == [("t", "failed")], "the end of the cancelled ticket")
        assert [m.WhichOneof("body") for m in link.posted if m.ticket == "t"] == ["abort"]


def test_cancel_that_crosses_the_state() -> None:
    """sglang #33507: an aborted transfer is not told as a success."""
    with open_link() as link:
        handoff = link.sink.reserve("t")
        link.sink.write_gate.clear()
        link.hand_over("t", Prompt(0))  # the first write is held; Cancelled finds State queued or sent
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        assert link.receiver.cancel("t")
        link.sink.write_gate.set()
        assert link.failure("t") == "cancelled"
        assert "t" not in link.sink.ready_states
        link.check_still_works()


def test_chunks_that_cross_a_cancel_are_drained_and_not_written() -> None:
    with open_link() as link:
        handoff = link.sink.reserve("t")
        raw(link, HandoffMessage(ticket="t", begin=BeginMessage(first_token=FIRST, num_tokens=NUM)))
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        assert link.receiver.cancel("t")
        raw(link, raw_chunk("t", 384), torch.zeros(384, dtype=torch.uint8))
        wait_for(lambda: link.sink.failures, "the failure")  # the Abort that answered Cancelled
        assert link.sink.failures == [("t", "cancelled")]
        link.check_still_works()
        assert not any(ticket == "t" for ticket, _, _ in link.sink.rows)


def test_a_cancel_while_the_hidden_rows_arrive_wins() -> None:
    with open_link() as link:
        handoff = link.sink.reserve("t", num_tokens=0)
        raw(link, HandoffMessage(ticket="t", begin=BeginMessage(first_token=FIRST, num_tokens=0)))
        raw(link, HandoffMessage(ticket="t", state=State(num_hidden_rows=1, num_bytes=HIDDEN_SIZE * 2)))
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        time.sleep(0.05)  # the receiver now waits for the bytes of State
        assert link.receiver.cancel("t")
        link.send_end.send(torch.zeros(HIDDEN_SIZE, dtype=torch.bfloat16))
        wait_for(lambda: link.sink.failures, "the failure")
        assert link.sink.failures == [("t", "cancelled")]
        assert link.sink.ready_states == {}


def test_a_ready_for_a_hand_off_without_state_is_ignored() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        link.sender.acknowledge(HandoffAck(ticket="t", ready=Ready()))
        assert link.sender.open_tickets == ("t",)
        assert link.terminal == []


def test_an_unknown_cancelled_is_answered_with_abort() -> None:
    with open_link() as link:
        link.sender.acknowledge(HandoffAck(ticket="gone", cancelled=Cancelled()))
        wait_for(lambda: bool(link.posted), "the Abort")
        assert [(m.ticket, m.WhichOneof("body")) for m in link.posted] == [("gone", "abort")]
