"""Chunks of several messages between a sender and a receiver: whatever ends a ticket in their midst, the link stays in
step."""

from __future__ import annotations

import pytest
import torch

import kv_transfer.handoff.cut
import kv_transfer.handoff.staging
from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.outbox import Outgoing
from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.base import NUM_BUFFERS
from kv_transfer.transports.loopback import loopback_pair
from paceline.v1.handoff_pb2 import HandoffMessage, State
from tests.support.handoff_link import (
    DRAFT,
    FIRST,
    LAYOUT,
    NUM,
    TARGET,
    TOKENS,
    Link,
    Prompt,
    narrow_window,
    open_link,
    raw,
    wait_for,
)

TOKEN_BYTES = sum(LAYOUT.layers[layer].row_elems for layer in TARGET) * 2
PIECES = (range(16, 26), range(26, 36), range(36, 46), range(46, 56), range(56, 66))


@pytest.fixture(autouse=True)
def messages_of_ten_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.handoff.cut, "MESSAGE_BYTES", 10 * TOKEN_BYTES)


def check_still_works(link: Link) -> None:
    """A later hand-off arrives as it was sent."""
    link.sink.reserve("after")
    prompt = Prompt(99)
    link.sender.begin("after", TOKENS)
    for tokens in PIECES:
        link.put("after", prompt, TARGET, tokens)
        link.put("after", prompt, DRAFT, tokens)
    link.sender.state("after", State(first_token_id=7), prompt.hidden)
    wait_for(lambda: "after" in link.sink.ready_states, "a later hand-off on the same link")
    link.check_rows("after", prompt)


def open_rows(link: Link, ticket: str) -> Outgoing:
    """All target rows, announced."""
    chunk = link.sender.open_chunk(ticket, RowBlock(TARGET_KV, TARGET, TOKENS), NUM * TOKEN_BYTES)
    assert chunk is not None
    return chunk


def give(link: Link, chunk: Outgoing, tokens: range, done: list[range] | None = None) -> bool:
    data = Prompt(0).flat(TARGET, tokens)
    return link.sender.give(chunk, data, lambda: done.append(tokens) if done is not None else None)


def written(link: Link) -> set[int]:
    rows = list(link.sink.rows)  # a copy: the receiver may be writing
    return {token for _, layer, token in rows if layer == TARGET.start}


def test_rows_are_written_message_by_message() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        chunk, done = open_rows(link, "t"), list[range]()
        for i, tokens in enumerate(PIECES):
            assert give(link, chunk, tokens, done)
            stop = tokens.stop
            wait_for(lambda stop=stop: written(link) == set(range(FIRST, stop)), "a message's rows")  # type: ignore[misc]
            wait_for(lambda i=i: done == list(PIECES[: i + 1]), "its buffer")  # type: ignore[misc]
        for tokens in PIECES:
            link.put("t", Prompt(0), DRAFT, tokens)
        link.sender.state("t", State(first_token_id=7), Prompt(0).hidden)
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        link.check_rows("t", Prompt(0))
        assert link.sender.bytes_sent("t")[TARGET_KV] == NUM * TOKEN_BYTES
        assert [m.chunk.num_tokens for m in link.posted if m.HasField("chunk")] == [50, *[10] * 5]
        refused: list[str] = []
        rows, block = torch.zeros(24000, dtype=torch.uint8), RowBlock(TARGET_KV, TARGET, range(FIRST, FIRST + 100))
        with pytest.raises(ValueError, match="24000 bytes are several messages"):
            link.sender.chunk("u", block, rows, lambda: refused.append("u"))
        assert refused == ["u"]


def test_both_ends_of_a_link_with_larger_messages_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many tokens a message. Mutants: the receiver cuts or expects as ever; its buffers are as ever."""
    monkeypatch.setattr(kv_transfer.handoff.staging, "MESSAGE_BYTES", 10 * TOKEN_BYTES)
    ends = loopback_pair(max_messages=2)
    for end in ends:
        end.multiple = 2
    with open_link(transports=ends) as link:
        made = [buffer.numel() for buffer in link.receiver._intake._staging._free]
        assert made == [20 * TOKEN_BYTES] * NUM_BUFFERS
        prompts = {ticket: Prompt(seed) for seed, ticket in enumerate("tu")}
        for ticket, prompt in prompts.items():
            link.sink.reserve(ticket)
            link.sender.begin(ticket, TOKENS)
            chunk = open_rows(link, ticket)
            for tokens in (range(16, 36), range(36, 56), range(56, 66)):
                assert link.sender.give(chunk, prompt.flat(TARGET, tokens), lambda: None)
            for tokens in (range(16, 41), range(41, 66)):
                link.put(ticket, prompt, DRAFT, tokens)
            link.sender.state(ticket, State(first_token_id=7), prompt.hidden)
        link.sender.begin("unknown", TOKENS)  # thrown away, in as many pieces
        chunk = open_rows(link, "unknown")
        for tokens in (range(16, 36), range(36, 56), range(56, 66)):
            link.sender.give(chunk, Prompt(0).flat(TARGET, tokens), lambda: None)
        wait_for(lambda: len(link.terminal) == 3, "the ends")
        for ticket, prompt in prompts.items():
            link.check_rows(ticket, prompt)
        check_still_works(link)


def test_an_abort_in_the_midst_ends_behind_the_last_message() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        chunk = open_rows(link, "t")
        assert give(link, chunk, PIECES[0])
        link.sender.abort("t", "the caller left")
        assert [m.WhichOneof("body") for m in link.posted] == ["begin", "chunk", "abort"]
        for tokens in PIECES[1:]:
            assert link.terminal == []
            assert give(link, chunk, tokens)
        assert link.failure("t") == "the caller left"
        check_still_works(link)


def test_a_chunk_that_is_dropped_before_it_is_announced_wants_no_bytes() -> None:
    with narrow_window(), open_link() as link:
        link.sink.write_gate.clear()
        link.sink.reserve("busy")
        link.sender.begin("busy", TOKENS)
        first = open_rows(link, "busy")
        for tokens in PIECES:
            give(link, first, tokens)
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        done: list[range] = []
        chunk = open_rows(link, "t")
        assert give(link, chunk, PIECES[0], done)
        link.sender.abort("t", "the caller left")
        assert done == [PIECES[0]]
        assert not give(link, chunk, PIECES[1], done)
        assert done == list(PIECES[:2])
        link.sink.write_gate.set()
        assert link.failure("t") == "the caller left"
        link.sender.abort("busy", "enough")
        link.failure("busy")
        check_still_works(link)


@pytest.mark.parametrize("ended_by", ["write error", "deadline", "cancel"])
def test_a_ticket_that_ends_at_the_receiver_is_not_written_any_more(ended_by: str) -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        chunk = open_rows(link, "t")
        if ended_by == "write error":
            link.sink.write_error = RuntimeError("no page")
            assert give(link, chunk, PIECES[0])
            reason = "writing rows failed: no page"
            wait_for(lambda: bool(link.sink.failures), "the failure")
            link.sink.write_error = None
        else:
            link.sink.write_gate.clear()
            assert give(link, chunk, PIECES[0])
            assert give(link, chunk, PIECES[1])
            wait_for(lambda: link.sink.handoffs["t"].bytes_by_class[TARGET_KV], "the first message, which is written")
            if ended_by == "deadline":
                assert link.receiver.fail("t", "too late")
                reason = "too late"
            else:
                assert link.receiver.cancel("t")
                reason = "cancelled"
            link.sink.write_gate.set()
        rows_before = PIECES[0] if ended_by != "write error" else range(0)
        for tokens in PIECES[1 if ended_by == "write error" else 2 :]:
            give(link, chunk, tokens)
        assert link.failure("t") == reason
        if ended_by != "cancel":  # a cancelled ticket is written to until its sender says Abort
            assert written(link) == set(rows_before)
        check_still_works(link)


def test_credit_is_told_within_a_chunk() -> None:
    with narrow_window(), open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        chunk = open_rows(link, "t")
        give(link, chunk, PIECES[0])
        wait_for(lambda: any(ack.HasField("credit") for ack in link.acks), "credit for the first message")
        assert written(link) == set(PIECES[0])
        for tokens in PIECES[1:]:
            give(link, chunk, tokens)
        wait_for(lambda: link.sender._outbox._uncredited == 0, "the rest")
        link.sender.abort("t", "enough")
        link.failure("t")


def test_a_link_lost_in_the_midst_gives_every_buffer_back_once() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        done: list[range] = []
        link.sink.write_gate.clear()
        chunk = open_rows(link, "t")
        for tokens in PIECES[:4]:
            assert give(link, chunk, tokens, done)
        link.sender.link_lost("pulled")
        link.sink.write_gate.set()
        assert not give(link, chunk, PIECES[4], done)
        wait_for(lambda: link.failed == [("t", "pulled")], "the failure")
        assert sorted(done, key=lambda r: r.start) == list(PIECES)


def test_a_sum_over_several_messages_is_refused() -> None:
    with open_link(send_sums=True, check_sums=True) as link:
        handoff = link.sink.reserve("t")
        link.sender.begin("t", TOKENS)
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        block = RowBlock(TARGET_KV, TARGET, range(FIRST, FIRST + 20))
        raw(link, HandoffMessage(ticket="t", chunk=block.to_proto(20 * TOKEN_BYTES, checksum=0)))
        for _ in range(2):
            link.send_end.send(torch.zeros(10 * TOKEN_BYTES, dtype=torch.uint8))
        link.sender.abort("t", "seen")
        assert link.failure("t") == "a checksum over several messages, whose rows are used as they come"
