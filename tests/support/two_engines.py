"""A prefill and a decode engine with the real link between them and no RPC: no gRPC server, no Ray, no event loop.

Each side has its engine thread; the control stream is whatever carries ``HandoffMessage`` there and ``HandoffAck``
back.
"""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable
from typing import Any

import torch

from decode_node.engine.engine import DecodeEngine
from decode_node.engine.reservations import HandoffDeadlines
from decode_node.engine.scheduler import DecodeLimits
from decode_node.sink import ReservedPages
from decode_node.stream import EventQueue, Stream
from kv_transfer.handoff.block import ByteClass
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.layout.reshard import Side, reshard
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import Transport
from paceline.engine.model_runner import ModelRunner
from paceline.errors import PacelineError
from paceline.request import SequenceRequest
from paceline.serving.loop import EngineLoop
from paceline.v1 import handoff_pb2
from prefill_node.engine.engine import PrefillEngine
from prefill_node.engine.scheduler import PrefillLimits
from prefill_node.feeder import RowFeeder
from prefill_node.job import PrefillJob

CHUNK_TOKENS = 5
WAIT_S = 60.0
Post = Callable[[handoff_pb2.HandoffMessage], None]
Ack = Callable[[handoff_pb2.HandoffAck], None]


def pool_digest(runner: ModelRunner, slots: torch.Tensor, num_tokens: int) -> str:
    """Digest of all layers' rows at the first ``num_tokens`` of ``slots``, bit for bit."""
    rows = runner.kv.gather(range(len(runner.kv.layout.layers)), slots[:num_tokens])
    return hashlib.blake2b(rows.cpu().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()


class Events(EventQueue):
    """The events of one stream, for a plain thread."""

    def __init__(self) -> None:
        self._said: queue.Queue[Any] = queue.Queue()

    @property
    def full(self) -> bool:
        return False

    def push(self, event: Any) -> None:
        self._said.put(event)

    def next(self, timeout_s: float = WAIT_S) -> Any:
        """Raises the error that ended the stream, or queue.Empty."""
        event = self._said.get(timeout=timeout_s)
        if isinstance(event, PacelineError):
            raise event
        return event


def failure_of(end: handoff_pb2.HandoffAck | str) -> str | None:
    """Why a hand-off failed, as its sender was told; None: it did not."""
    if isinstance(end, str):
        return end
    return None if end.HasField("ready") else end.failed.reason


class Decode:
    """The decode side, over one link after another."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        deadlines = HandoffDeadlines(reserve_s=WAIT_S, handoff_s=WAIT_S)
        self.engine = DecodeEngine(runner, DecodeLimits(8, 32, CHUNK_TOKENS), deadlines, {}, self)
        self.landed: dict[str, str] = {}  # pool_digest of each hand-off by ticket, before decoding touched it
        self._sink = ReservedPages(runner, self.engine.streams, self._ready, self._failed)
        self._receiver: HandoffReceiver | None = None
        self._tickets = 0
        self._loop = EngineLoop("decode", self.engine.step)
        self._loop.start()

    def attach(self, transport: Transport, ack: Ack, link_id: str, device: torch.device) -> HandoffReceiver:
        """Receive over a new link. device: where the transport writes."""
        self._receiver = HandoffReceiver(transport, self._sink, ack, link_id=link_id, device=device)
        return self._receiver

    def submit(self, request: SequenceRequest, local_prefill: bool = False) -> tuple[Stream, Events, int]:
        """Queue a request; with its reservation: (stream, events, tokens that decode has cached)."""
        self._tickets += 1
        events = Events()
        stream = Stream(request, local_prefill, f"t{self._tickets}", time.monotonic() + WAIT_S, events)
        self._loop.post(lambda: self.engine.submit(stream))
        return stream, events, events.next().reserved.cached_tokens

    def finish(self, events: Events) -> list[int]:
        """Tokens until the stream ends; raises the error that ended it."""
        tokens: list[int] = []
        while not (event := events.next()).HasField("finished"):
            tokens += event.tokens.token_ids
        return tokens

    def close(self) -> None:
        """Every page is back and the books are whole."""
        if self._receiver is not None:
            assert self._receiver.close(10)
        deadline = time.monotonic() + 10
        while self.engine.streams and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._loop.stop(10)
        assert not self.engine.streams
        assert self.runner.allocator.check_integrity() == []

    # LinkControl

    def cancel(self, link_id: str, ticket: str) -> None:
        assert self._receiver is not None
        self._receiver.cancel(ticket)

    def fail(self, link_id: str, ticket: str, reason: str) -> None:
        assert self._receiver is not None
        self._receiver.fail(ticket, reason)

    def _ready(self, ticket: str, state: handoff_pb2.State, draft: Any) -> None:
        landing = self.engine.streams[ticket].landing
        assert landing is not None
        self.landed[ticket] = pool_digest(self.runner, landing.slots, len(landing.slots))
        self._loop.post(lambda: self.engine.handoff_ready(ticket, state, draft))

    def _failed(self, ticket: str, reason: str) -> None:
        self._loop.post(lambda: self.engine.handoff_failed(ticket, reason))


class Prefill:
    """The prefill side of one link; the jobs' Carrier."""

    def __init__(self, runner: ModelRunner, transport: Transport, post: Post, device: torch.device) -> None:
        """device: where the transport reads from."""
        self.runner = runner
        self.engine = PrefillEngine(runner, PrefillLimits(CHUNK_TOKENS, 8, 32), WAIT_S)
        self.sent: dict[str, str] = {}  # pool_digest of each prompt by ticket, when all of it was computed
        self.sender = HandoffSender(
            transport,
            post,
            on_ended=lambda ticket, end: self._ended(ticket, failure_of(end)),
            on_link_lost=lambda reason: None,
        )
        layout = runner.kv.layout
        source = RowSource(runner.kv, reshard(Side(layout), Side(layout)))
        self._feeder = RowFeeder(self.sender, source, device, self._ended)
        self.begin, self.rows, self.hidden_rows = self._feeder.begin, self._feeder.rows, self._feeder.hidden_rows
        self.abort, self.groups, self.sending_s = self._feeder.abort, self._feeder.groups, self.sender.sending_s
        self._jobs: dict[str, PrefillJob] = {}
        self._loop = EngineLoop("prefill", self.engine.step)
        self._loop.start()

    def submit(self, request: SequenceRequest, ticket: str, first_token: int, emit: Callable[[Any], None]) -> None:
        """Compute a prompt and hand it over."""
        job = PrefillJob(request, ticket, first_token, self, time.monotonic() + WAIT_S, emit)
        self._jobs[ticket] = job
        self._loop.post(lambda: self.engine.submit(job))

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """See Carrier: every row is in the pool by now."""
        seq = self._jobs[ticket].seq
        assert seq is not None
        self.sent[ticket] = pool_digest(self.runner, seq.table.slots, seq.num_prefill)
        self._feeder.state(ticket, state, hidden)

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """See Carrier."""
        return self.sender.bytes_sent(ticket)

    def lost(self, reason: str) -> None:
        """See Carrier."""
        self.sender.link_lost(reason)

    def close(self) -> None:
        """Every page is back and the books are whole."""
        deadline = time.monotonic() + 10
        while self.engine.num_held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.sender.close(10)
        self._feeder.close(10)
        assert self._loop.stop(10)
        assert not self.engine.num_held
        assert self.runner.allocator.check_integrity() == []

    def _ended(self, ticket: str, failure: str | None) -> None:
        self._loop.post(lambda: self.engine.handoff_ended(ticket, failure, time.monotonic()))


def apart(prefill: Prefill, decode: Decode, asked: list[SequenceRequest]) -> list[list[int]]:
    """All requests at once, as the router drives them."""
    streams = [decode.submit(request) for request in asked]
    firsts: dict[str, int] = {}
    for request, (stream, _, cached) in zip(asked, streams, strict=True):

        def emit(event: object, ticket: str = stream.ticket) -> None:
            if not isinstance(event, Exception) and event.HasField("first_token"):  # type: ignore[attr-defined]
                firsts[ticket] = event.first_token.token_id  # type: ignore[attr-defined]

        prefill.submit(request, stream.ticket, cached, emit)
    found = [decode.finish(events) for _, events, _ in streams]
    return [[firsts[stream.ticket], *rest] for (stream, _, _), rest in zip(streams, found, strict=True)]
