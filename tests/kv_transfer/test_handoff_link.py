"""Sender and receiver over the loopback transport: bytes, counters, and every way a hand-off can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from kv_transfer.handoff import DRAFT_KV, HIDDEN, META, TARGET_KV, ByteClass, Handoff, HandoffPlan, HandoffState
from kv_transfer.loopback import loopback_pair
from kv_transfer.receiver import HandoffReceiver
from kv_transfer.sender import HandoffSender
from kv_transfer.transport import MESSAGE_BYTES, Transport, TransportError, byte_view
from paceline.errors import DeadlineExceeded, HandoffFailed
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import Abort, Cancelled, Chunk, HandoffAck, HandoffMessage, Hello, Ready, State
from paceline.v1.handoff_pb2 import Begin as BeginMessage

torch.set_num_threads(1)

LAYOUT = KvLayout(
    (
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 8),
        KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 24),
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 8),
        KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 2, 8),
        KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 2, 8),
    ),
    torch.bfloat16,
)
TARGET, DRAFT = range(0, 3), range(3, 5)
HIDDEN_SIZE = 12
FIRST, NUM = 16, 50  # decode holds 16 tokens of the prefix


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.002)


class DictSink:
    """Rows by (ticket, layer, token)."""

    def __init__(self) -> None:
        self.handoffs: dict[str, Handoff] = {}
        self.rows: dict[tuple[str, int, int], Tensor] = {}
        self.ready_states: dict[str, tuple[State, Tensor]] = {}
        self.failures: list[tuple[str, str]] = []
        self.write_gate = threading.Event()
        self.write_gate.set()
        self.write_error: Exception | None = None
        self.ready_error: Exception | None = None

    def reserve(self, ticket: str, num_tokens: int = NUM) -> Handoff:
        plan = HandoffPlan(LAYOUT, FIRST, num_tokens, HIDDEN_SIZE)
        handoff = Handoff(ticket, time.monotonic, plan, reserve_deadline_s=60, handoff_deadline_s=60)
        self.handoffs[ticket] = handoff
        return handoff

    def lookup(self, ticket: str) -> Handoff | None:
        return self.handoffs.get(ticket)

    def write_kv(
        self,
        ticket: str,
        byte_class: ByteClass,
        first_layer: int,
        num_layers: int,
        first_token: int,
        num_tokens: int,
        data: Tensor,
    ) -> None:
        assert self.write_gate.wait(10)
        if self.write_error is not None:
            raise self.write_error
        assert data.dtype is LAYOUT.dtype
        start = 0
        for layer in range(first_layer, first_layer + num_layers):
            width = LAYOUT.layers[layer].row_elems
            block = data[start : start + num_tokens * width].view(num_tokens, width)
            start += num_tokens * width
            for i in range(num_tokens):
                self.rows[ticket, layer, first_token + i] = block[i].clone()
        assert start == data.numel()

    def ready(self, ticket: str, state: State, hidden: Tensor) -> None:
        if self.ready_error is not None:
            raise self.ready_error
        self.ready_states[ticket] = (state, hidden)

    def failed(self, ticket: str, reason: str) -> None:
        assert self.handoffs[ticket].status is HandoffState.FAILED
        self.failures.append((ticket, reason))


class Prompt:
    """The source rows of one prompt, and their canonical flat slices."""

    def __init__(self, seed: int, num_tokens: int = NUM) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [
            torch.randn(num_tokens, layer.row_elems, generator=generator).bfloat16() for layer in LAYOUT.layers
        ]
        self.hidden = torch.randn(1, HIDDEN_SIZE, generator=generator).bfloat16()

    def flat(self, layers: range, tokens: range) -> Tensor:
        inside = slice(tokens.start - FIRST, tokens.stop - FIRST)
        return torch.cat([self.rows[layer][inside].reshape(-1) for layer in layers])


class Link:
    """Both ends, the control stream being direct calls."""

    def __init__(
        self,
        max_queued_bytes: int = 1 << 26,
        enqueue_timeout_s: float = 5.0,
        transports: tuple[Transport, Transport] | None = None,
    ) -> None:
        self.sink = DictSink()
        self.terminal: list[tuple[str, str]] = []  # ticket, kind of the last ack
        self.failed: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.receiver_lost: list[str] = []
        self.acks: list[HandoffAck] = []
        self.posted: list[HandoffMessage] = []
        self.send_end, self.recv_end = transports or loopback_pair(max_messages=2)
        self.receiver = HandoffReceiver(
            self.recv_end, self.sink, self.on_ack, link_id="link", on_link_lost=self.receiver_lost.append
        )
        self.sender = HandoffSender(
            self.send_end,
            self.post,
            on_terminal=lambda ticket, ack: self.terminal.append((ticket, ack.WhichOneof("body") or "")),
            on_failed=lambda ticket, reason: self.failed.append((ticket, reason)),
            on_link_lost=self.lost.append,
            max_queued_bytes=max_queued_bytes,
            enqueue_timeout_s=enqueue_timeout_s,
        )

    def post(self, message: HandoffMessage) -> None:
        self.posted.append(message)
        self.receiver.feed(message)

    def on_ack(self, ack: HandoffAck) -> None:
        self.acks.append(ack)
        self.sender.acknowledge(ack)

    def put(self, ticket: str, prompt: Prompt, layers: range, tokens: range) -> None:
        byte_class = DRAFT_KV if layers.start in DRAFT else TARGET_KV
        data = prompt.flat(layers, tokens)
        self.sender.chunk(ticket, byte_class, layers.start, len(layers), tokens.start, len(tokens), data)

    def hand_over(self, ticket: str, prompt: Prompt) -> None:
        """In pieces: layer groups and token ranges."""
        self.sender.begin(ticket, FIRST, NUM)
        for tokens in (range(16, 40), range(40, 66)):
            self.put(ticket, prompt, range(0, 2), tokens)
            self.put(ticket, prompt, range(2, 3), tokens)
            self.put(ticket, prompt, DRAFT, tokens)
        self.sender.state(ticket, State(first_token_id=7), prompt.hidden)

    def failure(self, ticket: str) -> str:
        """Wait until both ends know that the ticket failed; the reason at the receiver."""
        wait_for(lambda: ticket in [t for t, _ in self.sink.failures], f"failure of {ticket}")
        wait_for(lambda: ticket in [t for t, _ in self.terminal + self.failed], f"end of {ticket} at the sender")
        reasons = [reason for t, reason in self.sink.failures if t == ticket]
        assert len(reasons) == 1
        return reasons[0]

    def check_still_works(self) -> None:
        self.sink.reserve("after")
        prompt = Prompt(99)
        self.hand_over("after", prompt)
        wait_for(lambda: "after" in self.sink.ready_states, "a later hand-off on the same link")
        self.check_rows("after", prompt)

    def check_rows(self, ticket: str, prompt: Prompt) -> None:
        for layer, rows in enumerate(prompt.rows):
            got = torch.stack([self.sink.rows[ticket, layer, token] for token in range(FIRST, FIRST + NUM)])
            assert torch.equal(byte_view(got), byte_view(rows))


@contextmanager
def open_link(
    max_queued_bytes: int = 1 << 26,
    enqueue_timeout_s: float = 5.0,
    transports: tuple[Transport, Transport] | None = None,
) -> Iterator[Link]:
    link = Link(max_queued_bytes, enqueue_timeout_s, transports)
    try:
        yield link
    finally:
        link.sink.write_gate.set()
        assert link.sender.close(5)
        assert link.receiver.close(5)
        assert not link.receiver.draining
        assert not link.sender.open_tickets
        ends = [ticket for ticket, _ in link.terminal + link.failed]
        assert len(ends) == len(set(ends)), "a ticket ended twice at the sender"


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
        link.sender.begin("t", FIRST, 0)
        link.sender.state("t", State(first_token_id=1))
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        assert link.sink.ready_states["t"][1].shape == (0, HIDDEN_SIZE)


def test_hello_is_accepted() -> None:
    with open_link() as link:
        link.receiver.feed(HandoffMessage(hello=Hello(link_id="link")))
        wait_for(lambda: [ack.WhichOneof("body") for ack in link.acks] == ["hello"], "the answer to Hello")


def test_abort_midway() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sender.begin("t", FIRST, NUM)
        link.put("t", Prompt(0), range(0, 2), range(16, 40))
        wait_for(lambda: len(link.posted) == 2, "Begin and the chunk")
        link.sender.abort("t", "prefill gave up")
        link.sender.abort("t", "again")
        assert link.failure("t") == "prefill gave up"
        assert link.terminal == [("t", "failed")]
        with pytest.raises(HandoffFailed, match="not open"):
            link.put("t", Prompt(0), range(2, 3), range(16, 40))
        link.check_still_works()


def jam(link: Link) -> None:
    """Hold the receiver in a write and fill the pipe, so that the sender thread blocks; released by write_gate."""
    link.sink.write_gate.clear()
    link.sink.reserve("busy")
    link.sender.begin("busy", FIRST, NUM)
    for token in range(FIRST, FIRST + 6):
        link.put("busy", Prompt(0), TARGET, range(token, token + 1))
    wait_for(lambda: sum(m.WhichOneof("body") == "chunk" for m in link.posted) == 4, "a full pipe")


def test_abort_before_anything_was_sent() -> None:
    with open_link() as link:
        jam(link)
        handoff = link.sink.reserve("t")
        link.sender.begin("t", FIRST, NUM)
        link.sender.abort("t", "changed its mind")
        link.sink.write_gate.set()
        wait_for(lambda: link.terminal == [("t", "failed")], "the end of the aborted ticket")
        assert [m.WhichOneof("body") for m in link.posted if m.ticket == "t"] == ["abort"]
        # It never began on this link: the decode node gives the reservation up itself.
        assert handoff.fail_reserved("aborted")


def test_cancel_midway() -> None:
    with open_link() as link:
        handoff = link.sink.reserve("t")
        link.sender.begin("t", FIRST, NUM)
        link.put("t", Prompt(0), range(0, 2), range(16, 40))
        wait_for(lambda: handoff.bytes_by_class[TARGET_KV] > 0, "the first chunk")
        written = len(link.sink.rows)
        assert link.receiver.cancel("t")
        assert link.failure("t") == "cancelled"
        assert [ack.WhichOneof("body") for ack in link.acks] == ["cancelled", "failed"]
        assert link.posted[-1].WhichOneof("body") == "abort"
        assert len(link.sink.rows) == written
        assert not link.receiver.cancel("t")
        link.check_still_works()


def test_chunks_after_a_cancel_are_dropped_and_an_abort_takes_their_place() -> None:
    with open_link() as link:
        jam(link)
        link.sender.begin("t", FIRST, NUM)
        link.put("t", Prompt(0), TARGET, range(16, 40))
        link.sender.acknowledge(HandoffAck(ticket="t", cancelled=Cancelled()))
        link.put("t", Prompt(0), TARGET, range(40, 66))
        link.sender.state("t", State())
        link.sink.write_gate.set()
        wait_for(lambda: link.terminal == [("t", "failed")], "the end of the cancelled ticket")
        assert [m.WhichOneof("body") for m in link.posted if m.ticket == "t"] == ["abort"]


def test_cancel_that_crosses_the_state() -> None:
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
        link.sender.begin("t", FIRST, NUM)
        link.sender.acknowledge(HandoffAck(ticket="t", ready=Ready()))
        assert link.sender.open_tickets == ("t",)
        assert link.terminal == []


def test_an_unknown_cancelled_is_answered_with_abort() -> None:
    with open_link() as link:
        link.sender.acknowledge(HandoffAck(ticket="gone", cancelled=Cancelled()))
        wait_for(lambda: [m.WhichOneof("body") for m in link.posted] == ["abort"], "the Abort")


def test_unknown_ticket_is_drained_and_refused() -> None:
    with open_link() as link:
        link.sender.begin("ghost", FIRST, NUM)
        with suppress(HandoffFailed):  # the refusal may be quicker
            link.put("ghost", Prompt(0), TARGET, range(16, 66))
        wait_for(lambda: link.terminal == [("ghost", "failed")], "the refusal")
        assert link.acks[0].failed.reason == "unknown ticket"
        assert link.sink.failures == []
        link.check_still_works()


def raw(link: Link, message: HandoffMessage, data: Tensor | None = None) -> None:
    """Speak as a faulty sender would."""
    link.receiver.feed(message)
    if data is not None:
        link.send_end.send(data)


def raw_chunk(ticket: str, num_bytes: int, first_token: int = FIRST, num_tokens: int = 4) -> HandoffMessage:
    return HandoffMessage(
        ticket=ticket,
        chunk=Chunk(
            byte_class=TARGET_KV,
            first_layer=0,
            num_layers=1,
            first_token=first_token,
            num_tokens=num_tokens,
            num_bytes=num_bytes,
        ),
    )


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


def test_a_chunk_over_the_limit_is_drained_and_fails() -> None:
    with open_link() as link:
        link.receiver.close()
        link.send_end, link.recv_end = loopback_pair()
        link.receiver = HandoffReceiver(link.recv_end, link.sink, link.on_ack, max_chunk_bytes=383)
        link.sink.reserve("t")
        raw(link, HandoffMessage(ticket="t", begin=BeginMessage(first_token=FIRST, num_tokens=NUM)))
        raw(link, raw_chunk("t", 384), torch.zeros(384, dtype=torch.uint8))
        wait_for(lambda: link.sink.failures, "the failure")
        assert "at most 383" in link.sink.failures[0][1]


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
    link.sender.begin("t", FIRST - 1 if fault == "wrong range" else FIRST, NUM)
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
        other.receiver._sink = link.sink
        handoff = link.sink.reserve("t")
        link.sender.begin("t", FIRST, NUM)
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        other.sender.begin("t", FIRST, NUM)
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
        link.sender.begin("t", FIRST, NUM)
        wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
        assert link.receiver.fail("t", "overdue")
        assert link.failure("t") == "overdue"
        assert link.terminal == [("t", "failed")]
        assert not link.receiver.fail("t", "twice")


def test_a_failure_is_told_only_after_the_write_in_progress() -> None:
    with open_link() as link:
        link.sink.reserve("t")
        link.sink.write_gate.clear()
        link.sender.begin("t", FIRST, NUM)
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


def test_queue_is_bounded_in_bytes_and_time() -> None:
    row = len(Prompt(0).flat(TARGET, range(16, 17))) * 2
    with open_link(max_queued_bytes=4 * row, enqueue_timeout_s=0.1) as link:
        link.sink.write_gate.clear()
        link.sink.reserve("t")
        link.sender.begin("t", FIRST, NUM)
        # One row in the write that is held, two in the pipe, one on the wire, three queued.
        for token in range(16, 23):
            wait_for(lambda: link.sender._outbox.has_room(row), "room")
            link.put("t", Prompt(0), TARGET, range(token, token + 1))
            time.sleep(0.02)
        with pytest.raises(DeadlineExceeded, match="no room"):
            link.put("t", Prompt(0), TARGET, range(23, 24))
        timer = threading.Timer(0.02, link.sink.write_gate.set)
        timer.start()
        link.put("t", Prompt(0), TARGET, range(23, 24))  # waits for room, and gets it
        timer.join()
        link.sender.abort("t", "enough")
        wait_for(lambda: link.terminal, "the end")


def test_one_chunk_larger_than_the_queue_still_passes() -> None:
    with open_link(max_queued_bytes=16) as link:
        link.sink.reserve("t")
        prompt = Prompt(0)
        link.hand_over("t", prompt)
        wait_for(lambda: link.terminal == [("t", "ready")], "the acknowledgement")
        link.check_rows("t", prompt)


def test_a_lost_link_fails_every_ticket_once() -> None:
    with open_link() as link:
        tickets = ("a", "b")
        for ticket in tickets:
            link.sink.reserve(ticket)
            link.sender.begin(ticket, FIRST, NUM)
        wait_for(lambda: all(h.status is HandoffState.SENDING for h in link.sink.handoffs.values()), "Begins")
        link.send_end.abort()  # as a peer's death looks to a transport
        link.put("a", Prompt(0), TARGET, range(16, 66))
        for ticket in tickets:
            assert "abort" in link.failure(ticket)
        assert sorted(t for t, _ in link.failed + link.terminal) == ["a", "b"]  # by own error or by a last Failed
        wait_for(lambda: link.lost and link.receiver_lost, "on_link_lost at both ends")
        assert (len(link.lost), len(link.receiver_lost)) == (1, 1)
        link.sender.link_lost("again")
        link.receiver.link_lost("again")
        assert (len(link.lost), len(link.receiver_lost)) == (1, 1)
        assert not link.sender.alive
        with pytest.raises(TransportError, match="dead"):
            link.sender.begin("c", FIRST, NUM)
        with pytest.raises(TransportError, match="dead"):
            link.receiver.feed(HandoffMessage(ticket="a", abort=Abort()))


class StuckTransport(Transport):
    """A pipe whose calls block until ``release``, whatever is aborted: gloo in the middle of a message."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()

    def _block(self) -> None:
        self.entered.set()
        assert self.release.wait(10)
        raise TransportError("message timeout")

    def _send_message(self, data: Tensor) -> None:
        self._block()

    def _recv_message(self, data: Tensor) -> None:
        self._block()

    def close(self) -> None: ...

    def abort(self) -> None: ...


def test_buffers_are_quarantined_while_a_receive_or_a_send_is_stuck() -> None:
    stuck = (StuckTransport(), StuckTransport())
    with open_link(transports=stuck) as link:
        for ticket in ("on wire", "waiting"):
            link.sink.reserve(ticket)
            link.sender.begin(ticket, FIRST, NUM)
        link.put("on wire", Prompt(0), TARGET, range(16, 66))
        assert stuck[0].entered.wait(5)
        assert stuck[1].entered.wait(5)
        link.receiver.link_lost("peer died")
        link.sender.link_lost("peer died")
        # Tickets whose bytes are not on the wire may go at once; the other only when the blocked call returned.
        assert link.failed == [("waiting", "peer died")]
        assert set(link.sender.open_tickets) == {"on wire"}
        assert set(link.receiver.draining) == {"on wire", "waiting"}
        assert link.sink.failures == []
        assert not link.receiver.close(0.01)
        assert not link.sender.close(0.01)
        for transport in stuck:
            transport.release.set()
        assert link.failure("on wire") == "peer died"
        assert link.failure("waiting") == "peer died"


def test_close_fails_what_is_open_and_is_not_a_loss() -> None:
    link = Link()
    handoff = link.sink.reserve("t")
    link.sender.begin("t", FIRST, NUM)
    wait_for(lambda: handoff.status is HandoffState.SENDING, "Begin")
    assert link.sender.close(5)
    assert link.receiver.close(5)
    assert link.failed == [("t", "link closed")]
    assert link.sink.failures == [("t", "link closed")]
    assert link.lost == link.receiver_lost == []
    assert link.sender.close(5)
    assert link.receiver.close(5)
