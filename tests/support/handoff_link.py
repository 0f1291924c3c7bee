"""Sender and receiver over the loopback transport, with a sink that keeps every row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from kv_transfer.handoff.block import DRAFT_KV, TARGET_KV, RowBlock
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.handoff.state import Handoff, HandoffState
from kv_transfer.transports.base import Transport, byte_view
from kv_transfer.transports.loopback import loopback_pair
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import HandoffAck, HandoffMessage, State

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
TOKENS = range(FIRST, FIRST + NUM)


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
        expected = ExpectedRows(LAYOUT, range(FIRST, FIRST + num_tokens), HIDDEN_SIZE)
        handoff = Handoff(ticket, time.monotonic, expected, reserve_deadline_s=60, handoff_deadline_s=60)
        self.handoffs[ticket] = handoff
        return handoff

    def lookup(self, ticket: str) -> Handoff | None:
        return self.handoffs.get(ticket)

    def write_kv(self, ticket: str, block: RowBlock, data: Tensor) -> None:
        assert self.write_gate.wait(10)
        if self.write_error is not None:
            raise self.write_error
        assert data.dtype is LAYOUT.dtype
        start, num_tokens = 0, len(block.tokens)
        for layer in block.layers:
            width = LAYOUT.layers[layer].row_elems
            rows = data[start : start + num_tokens * width].view(num_tokens, width)
            start += num_tokens * width
            for token, row in zip(block.tokens, rows, strict=True):
                self.rows[ticket, layer, token] = row.clone()
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
        send_sums: bool = False,
        check_sums: bool = False,
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
            self.recv_end,
            self.sink,
            self.on_ack,
            link_id="link",
            on_link_lost=self.receiver_lost.append,
            checksums=check_sums,
        )
        self.sender = HandoffSender(
            self.send_end,
            self.post,
            on_ended=self.on_ended,
            on_link_lost=self.lost.append,
            max_queued_bytes=max_queued_bytes,
            enqueue_timeout_s=enqueue_timeout_s,
            checksums=send_sums,
        )

    def post(self, message: HandoffMessage) -> None:
        self.posted.append(message)
        self.receiver.feed(message)

    def on_ended(self, ticket: str, end: HandoffAck | str) -> None:
        if isinstance(end, str):
            self.failed.append((ticket, end))
        else:
            self.terminal.append((ticket, end.WhichOneof("body") or ""))

    def on_ack(self, ack: HandoffAck) -> None:
        self.acks.append(ack)
        self.sender.acknowledge(ack)

    def put(self, ticket: str, prompt: Prompt, layers: range, tokens: range) -> None:
        byte_class = DRAFT_KV if layers.start in DRAFT else TARGET_KV
        data = prompt.flat(layers, tokens)
        self.sender.chunk(ticket, RowBlock(byte_class, layers, tokens), data)

    def hand_over(self, ticket: str, prompt: Prompt) -> None:
        """In pieces: layer groups and token ranges."""
        self.sender.begin(ticket, TOKENS)
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
    send_sums: bool = False,
    check_sums: bool = False,
) -> Iterator[Link]:
    link = Link(max_queued_bytes, enqueue_timeout_s, transports, send_sums, check_sums)
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


@contextmanager
def narrow_window() -> Iterator[None]:
    """Links have credit for four rows of the target's layers."""
    row_bytes = LAYOUT.token_bytes(LayerOwner.TARGET)
    with (
        patch("kv_transfer.handoff.outbox.WINDOW_BYTES", 3 * row_bytes + 1),
        patch("kv_transfer.handoff.staging.CREDIT_BYTES", 1),
    ):
        yield


def jam(link: Link) -> None:
    """Hold the receiver in a write and fill a `narrow_window`, so that nothing more is announced; released by
    write_gate."""
    link.sink.write_gate.clear()
    link.sink.reserve("busy")
    link.sender.begin("busy", TOKENS)
    for token in range(FIRST, FIRST + 6):
        link.put("busy", Prompt(0), TARGET, range(token, token + 1))
    wait_for(lambda: sum(m.WhichOneof("body") == "chunk" for m in link.posted) == 4, "a full window")


def raw(link: Link, message: HandoffMessage, data: Tensor | None = None) -> None:
    """Speak as a faulty sender would."""
    link.receiver.feed(message)
    if data is not None:
        link.send_end.send(data)


def raw_chunk(ticket: str, num_bytes: int, first_token: int = FIRST, num_tokens: int = 4) -> HandoffMessage:
    block = RowBlock(TARGET_KV, range(1), range(first_token, first_token + num_tokens))
    return HandoffMessage(ticket=ticket, chunk=block.to_proto(num_bytes))
