"""Hand-offs that break the protocol, or whose sink or owner fails them: that ticket alone ends."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import suppress

import pytest
import torch

from kv_transfer.handoff.block import TARGET_KV
from kv_transfer.handoff.cut import MAX_CONTROL_BYTES
from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.base import MESSAGE_BYTES, TransportError
from paceline.errors import HandoffFailed
from paceline.v1.handoff_pb2 import Abort, Chunk, HandoffMessage, State
from paceline.v1.handoff_pb2 import Begin as BeginMessage
from tests.support.handoff_link import (
    DRAFT,
    FIRST,
    HIDDEN_SIZE,
    NUM,
    TARGET,
    TOKENS,
    Link,
    Prompt,
    open_link,
    raw,
    raw_chunk,
    wait_for,
)

torch.set_num_threads(1)


def test_unknown_ticket_is_drained_and_refused() -> None:
    with open_link() as link:
        link.sender.begin("ghost", TOKENS)
        with suppress(HandoffFailed):  # the refusal may be quicker
            link.put("ghost", Prompt(0), TARGET, range(16, 66))
        wait_for(lambda: link.terminal == [("ghost", "failed")], "the refusal")
        assert link.acks[0].failed.reason == "unknown ticket"
        assert link.sink.failures == []
        link.check_still_works()


@pytest.mark.parametrize("num_bytes", [0, 2, 383, 386, MESSAGE_BYTES + 2])
def test_a_wrong_size_is_drained_and_fails_that_ticket_alone(num_bytes: int) -> None:
    with open_link() as link:
        handoff = link.sink.reserve("t")
        raw(link, HandoffMessage(ticket="t", begin=BeginMessage(first_token=FIRST, num_tokens=NUM)))
        raw(link, raw_chunk("t", num_bytes), torch.zeros(num_bytes, dtype=torch.uint8))
        wait_for(lambda: link.sink.failures, "the failure")
        assert "where the layout says 384" in link.sink.failures[0][1]
        assert handoff.status is HandoffState.FAILED
        # What the sender still sends of it is drained, in step, and not written.
        raw(link, raw_chunk("t", 384), torch.zeros(384, dtype=torch.uint8))
        state = State(num_hidden_rows=1, num_bytes=HIDDEN_SIZE * 2)
        raw(link, HandoffMessage(ticket="t", state=state), torch.zeros(HIDDEN_SIZE, dtype=torch.bfloat16))
        link.check_still_works()
        assert not any(ticket == "t" for ticket, _, _ in link.sink.rows)
        assert len(link.sink.failures) == 1


IMPOSSIBLE = {
    "tokens of an unknown ticket": HandoffMessage(
        ticket="?", chunk=Chunk(byte_class=TARGET_KV, num_layers=1, num_tokens=2**32 - 1, num_bytes=2**32 - 1)
    ),
    "a loop over tokens": HandoffMessage(
        ticket="?", chunk=Chunk(byte_class=TARGET_KV, num_layers=1, num_tokens=2**32 - 1, num_bytes=(2**32 - 1) << 23)
    ),
    "more tokens than bytes": HandoffMessage(ticket="?", chunk=Chunk(num_layers=1, num_tokens=2**32 - 1, num_bytes=8)),
    "hidden rows": HandoffMessage(ticket="?", state=State(num_hidden_rows=1, num_bytes=2**63)),
    "a long text": HandoffMessage(ticket="?", abort=Abort(reason="x" * MAX_CONTROL_BYTES)),
}


@pytest.mark.parametrize("message", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_message_that_no_sender_writes_ends_the_link_at_once(message: HandoffMessage) -> None:
    """Mutant: without `announcement_problem`, "a loop over tokens" makes a range for each of 4.3 G tokens."""
    with open_link() as link:
        link.sink.reserve("t")
        raw(link, HandoffMessage(ticket="t", begin=BeginMessage(first_token=FIRST, num_tokens=NUM)))
        wait_for(lambda: link.receiver._in_flight.tickets, "the hand-off beside it")
        tracemalloc.start()
        began = time.perf_counter()
        with pytest.raises(TransportError, match=r"announced|control message of"):
            link.receiver.feed(message)
        took_s, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert took_s < 0.05
        assert peak < 10e6
        wait_for(lambda: link.receiver_lost, "the end of the link")
        assert [ticket for ticket, _ in link.sink.failures] == ["t"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gap", "rows of layer 2 are missing"),
        ("overlap", "sent twice"),
        ("wrong hidden", "hidden rows"),
        ("begun twice", "begun twice"),
        ("wrong range", "are reserved"),
    ],
)
def test_a_protocol_fault_fails_closed(fault: str, words: str) -> None:
    with open_link() as link:
        link.sink.reserve("t")
        with suppress(HandoffFailed):  # the refusal may be quicker
            play_fault(link, fault)
        assert words in link.failure("t")
        assert "t" not in link.sink.ready_states
        link.check_still_works()


def play_fault(link: Link, fault: str) -> None:
    prompt = Prompt(0)
    first = FIRST - 1 if fault == "wrong range" else FIRST
    link.sender.begin("t", range(first, first + NUM))
    wait_for(lambda: link.posted, "Begin")
    if fault == "begun twice":
        link.post(link.posted[0])
    link.put("t", prompt, range(0, 2), range(16, 66))
    link.put("t", prompt, DRAFT, range(16, 66))
    link.put("t", prompt, range(2, 3), range(16, 65))
    if fault == "overlap":
        link.put("t", prompt, range(2, 3), range(64, 66))
    if fault != "gap":
        link.put("t", prompt, range(2, 3), range(65, 66))
    width = HIDDEN_SIZE + (fault == "wrong hidden")
    link.sender.state("t", State(), torch.zeros(1, width, dtype=torch.bfloat16))


def test_a_second_link_cannot_take_over_a_ticket() -> None:
    with open_link() as link, open_link() as other:
        other.sink = link.sink
        other.receiver._in_flight._sink = other.receiver._intake._sink = link.sink
        handoff = link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        other.sender.begin("t", TOKENS)
        other.sender.abort("t", "foreign")
        wait_for(lambda: other.terminal == [("t", "failed")], "the refusal")
        assert handoff.status is HandoffState.SENDING
        assert link.sink.failures == []
        prompt = Prompt(0)
        for layers in (TARGET, DRAFT):
            link.put("t", prompt, layers, range(16, 66))
        link.sender.state("t", State(), prompt.hidden)
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")


def test_a_failing_sink_fails_that_ticket_alone() -> None:
    for attribute in ("write_error", "ready_error"):
        with open_link() as link:
            link.sink.reserve("t")
            setattr(link.sink, attribute, RuntimeError("pool is gone"))
            with suppress(HandoffFailed):  # the refusal may be quicker
                link.hand_over("t", Prompt(0))
            assert "pool is gone" in link.failure("t")
            setattr(link.sink, attribute, None)
            link.check_still_works()


def test_the_owner_fails_an_overdue_ticket() -> None:
    with open_link() as link:
        handoff = link.sink.reserve("t")
        assert not link.receiver.fail("t", "not in flight yet")
        link.sender.begin("t", TOKENS)
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        assert link.receiver.fail("t", "overdue")
        assert link.failure("t") == "overdue"
        assert link.terminal == [("t", "failed")]
        assert not link.receiver.fail("t", "twice")


def test_a_failure_is_told_only_after_the_write_in_progress() -> None:
    """TensorRT-LLM #13713: nothing is released before the transfer is terminal."""
    with open_link() as link:
        link.sink.reserve("t")
        link.sink.write_gate.clear()
        link.sender.begin("t", TOKENS)
        link.put("t", Prompt(0), TARGET, range(16, 66))
        wait_for(lambda: link.sink.handoffs["t"].bytes_by_class[TARGET_KV], "the write")
        assert link.receiver.fail("t", "overdue")
        link.receiver.link_lost("peer died")
        time.sleep(0.05)
        assert link.sink.failures == []
        assert set(link.receiver.draining) == {"t"}
        link.sink.write_gate.set()
        wait_for(lambda: link.sink.failures, "the failure")
        assert link.sink.failures == [("t", "overdue")]
        wait_for(lambda: link.receiver_lost, "on_link_lost")
        assert not link.receiver.draining
