"""Credit: what is announced and not taken in is bounded, announcing runs ahead of sending, no credit ends the link."""

from __future__ import annotations

import pytest
import torch

import kv_transfer.handoff.outbox
from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.loopback import loopback_pair
from paceline.v1.handoff_pb2 import Credit, HandoffAck, HandoffMessage, State
from tests.support.handoff_link import FIRST, Prompt, jam, narrow_window, open_link, wait_for

torch.set_num_threads(1)
ROW_BYTES = (48 + 24 + 48) * 2


def test_descriptors_run_ahead_of_the_bytes_as_far_as_credit_goes() -> None:
    with narrow_window(), open_link() as link:
        jam(link)  # six rows are queued, the receiver holds the first
        assert sum(m.HasField("chunk") for m in link.posted) == 4
        assert len(link.sender._outbox) > 0
        link.sink.write_gate.set()
        wait_for(lambda: sum(m.HasField("chunk") for m in link.posted) == 6, "the rest")
        credits = [ack.credit.num_bytes for ack in link.acks if ack.HasField("credit")]
        assert sum(credits) <= 6 * ROW_BYTES
        link.sender.abort("busy", "enough")
        wait_for(lambda: link.terminal, "the end")


def test_a_hand_off_of_any_size_gets_through_a_narrow_window() -> None:
    with narrow_window(), open_link() as link:
        handoff = link.sink.reserve("t")
        prompt = Prompt(0)
        link.hand_over("t", prompt)  # chunks of up to 26 rows: larger than the window
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        link.check_rows("t", prompt)
        assert handoff.status is HandoffState.READY
        wait_for(lambda: link.sender._outbox._uncredited == 0, "the last credit, which follows Ready")


def test_bytes_that_are_thrown_away_give_credit_too() -> None:
    with narrow_window(), open_link() as link:
        jam(link)
        wait_for(lambda: link.sink.handoffs["busy"].status is HandoffState.SENDING, "Begin")
        assert link.receiver.fail("busy", "too late")
        link.sink.write_gate.set()
        assert link.failure("busy") == "too late"
        wait_for(lambda: link.sender._outbox._uncredited == 0, "credit")
        link.check_still_works()


def test_a_receiver_that_gives_no_credit_loses_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer.handoff.outbox, "WINDOW_BYTES", 8)
    send_end, _ = loopback_pair()
    posted: list[HandoffMessage] = []
    ended: list[tuple[str, HandoffAck | str]] = []
    lost: list[str] = []
    sender = HandoffSender(
        send_end,
        posted.append,
        on_ended=lambda ticket, end: ended.append((ticket, end)),
        on_link_lost=lost.append,
    )
    try:
        sender.begin("t", range(3))
        given_back: list[int] = []
        for i in range(3):
            data = torch.zeros(8, dtype=torch.uint8)
            sender.chunk("t", RowBlock(TARGET_KV, range(1), range(i, i + 1)), data, lambda i=i: given_back.append(i))  # type: ignore[misc]
        wait_for(lambda: given_back == [0], "the first chunk")
        with (
            sender._outbox.changed
        ):  # so that the thread waits for so short a time only once the second chunk is announced
            sender._pump._credit_timeout_s = 0.3
            sender.acknowledge(HandoffAck(credit=Credit(num_bytes=8)))
            assert [m.WhichOneof("body") for m in posted] == ["begin", "chunk", "chunk"]
        wait_for(lambda: bool(lost), "the end of the link")
        assert lost == ["no credit from the receiver within 0.3 s"]
        assert ended == [("t", lost[0])]
        assert given_back == [0, 1, 2]
        assert [m.WhichOneof("body") for m in posted] == ["begin", "chunk", "chunk"]
    finally:
        assert sender.close(5.0)


def test_seconds_of_sending_are_counted_of_bytes_alone() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.hand_over("t", Prompt(0))
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        assert 0.0 < link.sender.sending_s("t") < 5.0
        link.sink.reserve("empty", num_tokens=0)
        link.sender.begin("empty", range(FIRST, FIRST))
        link.sender.state("empty", State())
        wait_for(lambda: len(link.terminal) == 2, "the acknowledgement")
        assert link.sender.sending_s("empty") == link.sender.sending_s("never heard of") == 0.0
