"""A prefill and a decode engine, and the links between them, on one thread and one clock: every step is a call.

Engines, senders, receivers, feeders and the sink are the real ones; the control stream is a queue in each direction,
the nodes' event loops are lists of posted work. handoff_rules.py says what must never be so.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from decode_node.engine.engine import DecodeEngine
from decode_node.engine.reservations import HandoffDeadlines
from decode_node.engine.scheduler import DecodeLimits
from decode_node.stream import Stream, StreamPhase
from kv_transfer.handoff.state import Handoff, HandoffState
from paceline.config import NodeConfig
from paceline.errors import PacelineError, RequestCancelled
from paceline.request import SamplingParams, SequenceRequest
from paceline.v1.handoff_pb2 import Abort, Begin, Cancelled, Failed, HandoffAck, HandoffMessage, Ready, State
from prefill_node.engine.engine import PrefillEngine
from prefill_node.engine.scheduler import PrefillLimits
from prefill_node.job import JobPhase, PrefillJob
from tests.support.handoff_fuzz_link import FuzzLink, ListEvents, WatchedSink
from tests.support.handoff_runner import FuzzRunner

RESERVE_S, HANDOFF_S, ANSWER_S = 5.0, 5.0, 9.0
MAX_LINKS = 6
TIMED = (
    "prefill_node.engine.engine",
    "decode_node.engine.reservations",
    "decode_node.engine.engine",
    "decode_node.engine.handoffs",
    "decode_node.engine.work",
)
SMALL = {  # bytes, so that a chunk of 6 tokens leaves layer by layer, in several messages, and credit runs out
    "prefill_node.groups.MIN_BYTES": 1,
    "prefill_node.groups.MESSAGE_BYTES": 512,
    "kv_transfer.handoff.cut.MESSAGE_BYTES": 256,
    "kv_transfer.handoff.cut.CHUNK_BYTES": 1536,
    "prefill_node.engine.sends.MIN_BYTES": 1,
    "kv_transfer.handoff.outbox.WINDOW_BYTES": 1024,
    "kv_transfer.handoff.staging.CREDIT_BYTES": 256,
    # The size of a buffer: thousands of worlds wait for the garbage collector.
    "kv_transfer.handoff.staging.MESSAGE_BYTES": 4096,
}


@dataclass
class Asked:
    """One request and what its two callers were told."""

    stream: Stream
    events: ListEvents
    attempts: list[tuple[PrefillJob, list[Any]]] = field(default_factory=list)


class World:
    """All of it. Every method is one step of one thread."""

    # It has over 20 methods, since each step, and each event that links tell of, has one.

    def __init__(self, mode: str, cache: bool) -> None:
        self._stack = ExitStack()
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in TIMED:
            self._stack.enter_context(patch(f"{module}.time", clock))
        for name, value in SMALL.items():
            self._stack.enter_context(patch(name, value))
        logging.disable(logging.CRITICAL)
        self._stack.callback(logging.disable, logging.NOTSET)
        shared: dict[str, Any] = {"model": "fake", "num_draft_tokens": 2, "prefill_chunk_tokens": 6}
        self.faults: list[str] = []
        self.prefill = FuzzRunner(
            NodeConfig(**shared, page_size=4, kv_cache_tokens=96, prefix_cache=cache and mode == "draft_kv"),
            mode,
            self.faults,
        )
        self.decode = FuzzRunner(
            NodeConfig(**shared, page_size=8, kv_cache_tokens=128, prefix_cache=cache), mode, self.faults
        )
        self.p_engine = PrefillEngine(self.prefill.runner, PrefillLimits(6, 3, 4), ANSWER_S)
        self.d_engine = DecodeEngine(
            self.decode.runner, DecodeLimits(3, 4, 6), HandoffDeadlines(RESERVE_S, HANDOFF_S), {}, self
        )
        self.p_inbox: deque[Callable[[], None]] = deque()
        self.d_inbox: deque[Callable[[], None]] = deque()
        self.sink = WatchedSink(self.decode.runner, self.d_engine.streams, self._on_ready, self._on_failed)
        self.sink.world = self
        self.links: list[FuzzLink] = []
        self.asked: list[Asked] = []
        self.handoffs: dict[str, Handoff] = {}
        self.told_decode: Counter[str] = Counter()  # ready or failed, by the links
        self.begun: Counter[str] = Counter()
        self.told_prefill: Counter[str] = Counter()
        self._in_p_step = False
        self.prefill.between = self.between
        self.during: Callable[[], object] | None = None  # what happens in the midst of what comes next

    def between(self) -> None:
        """The midst of a send, a receive, a write, a gather or a forward."""
        during, self.during = self.during, None
        if during is not None:
            during()

    # -- the callers ---------------------------------------------------------------------------------------------

    def ask(self, num_prompt: int, max_tokens: int, local: bool, same_prompt: bool) -> None:
        """A Decode RPC."""
        number = len(self.asked)
        base = 0 if same_prompt else number * 37 + 5
        prompt = tuple((base + i * 11) % 997 for i in range(num_prompt))
        request = SequenceRequest(f"request-{number}", prompt, SamplingParams(max_tokens=max_tokens, seed=number))
        events = ListEvents()
        stream = Stream(request, local, f"t{number}", self.now + RESERVE_S, events)
        self.asked.append(Asked(stream, events))

        def submit() -> None:
            try:
                self.d_engine.submit(stream)
            except PacelineError as error:
                events.push(error)

        self.d_inbox.append(submit)

    def attempt(self, number: int, leave_out: str, newest: bool) -> None:
        """A Prefill RPC for a reservation, perhaps a second one for the same ticket."""
        asked = self._reserved(number)
        if asked is None:
            return
        link = self._link(newest)
        if link is None or asked.stream.ticket in link.foreign:
            return
        link.served.add(asked.stream.ticket)
        said: list[Any] = []
        cached = asked.events.said[0].reserved.cached_tokens
        job = PrefillJob(asked.stream.request, asked.stream.ticket, cached, link, self.now + RESERVE_S, said.append)
        asked.attempts.append((job, said))

        def submit() -> None:
            try:
                self.p_engine.submit(job)
                link.feeder.leave_out[job.ticket] = leave_out
            except PacelineError as error:
                said.append(error)

        self.p_inbox.append(submit)

    def leave_decode(self, number: int) -> None:
        """One whose rows are crossing, if there is any."""
        streams = [asked.stream for asked in self.asked]
        crossing = [s for s in streams if s.landing and s.landing.handoff.status is HandoffState.SENDING]
        if streams:
            stream = (crossing or streams)[number % len(crossing or streams)]
            self.d_inbox.append(lambda: self.d_engine.leave(stream))

    def leave_prefill(self, number: int) -> None:
        """One that has begun its hand-off, if there is any."""
        jobs = [job for asked in self.asked for job, _ in asked.attempts]
        jobs = [job for job in jobs if job.begun and job.phase is not JobPhase.RELEASED] or jobs
        if jobs:
            job = jobs[number % len(jobs)]
            self.p_inbox.append(lambda: self.p_engine.give_up(job, RequestCancelled("the caller went away")))

    # -- the threads ---------------------------------------------------------------------------------------------

    def p_step(self) -> bool:
        """False when there was nothing to do, or the engine is in the midst of a step."""
        if self._in_p_step:
            return False
        worked = bool(self.p_inbox)
        while self.p_inbox:
            self.p_inbox.popleft()()
        self._in_p_step = True
        try:
            return self.p_engine.step() or worked
        finally:
            self._in_p_step = False

    def d_step(self) -> bool:
        worked = bool(self.d_inbox)
        while self.d_inbox:
            self.d_inbox.popleft()()
        worked = self.d_engine.step() or worked
        for ticket, stream in self.d_engine.streams.items():
            if stream.landing is not None:
                self.handoffs[ticket] = stream.landing.handoff
        return worked

    def turn(self, what: str, number: int) -> bool:
        """One turn of a link's feeder, sender, control stream (either way) or receiver."""
        if not self.links:
            return False
        link = self.links[number % len(self.links)]
        if what == "receive":
            return link.bytes_are_there() and link.receiver.turn()
        turns = {"feed": link.feeder.turn, "send": link.sender.turn, "deliver": link.deliver, "ack": link.ack}
        return turns[what]()

    def pump(self, rounds: int) -> bool:
        """Everybody's turn, so often; False when nobody had anything to do in the last of them."""
        worked = False
        for _ in range(rounds):
            worked = self.p_step()
            for number in range(len(self.links)):
                for what in ("feed", "send", "deliver", "receive", "ack"):
                    worked = self.turn(what, number) or worked
            worked = self.d_step() or worked
        return worked

    def advance(self, seconds: float) -> None:
        """Time passes, and both timers run."""
        self.now += seconds
        self.p_inbox.append(self.p_engine.expire)
        self.d_inbox.append(self.d_engine.expire)

    def lose(self, number: int, side: str) -> None:
        """The link breaks, as one side sees it; the other learns later."""
        if self.links:
            link = self.links[number % len(self.links)]
            (link.sender if side == "prefill" else link.receiver).link_lost(f"lost at {side}")

    def stale_ack(self, number: int, kind: str, ticket: int) -> None:
        """An answer about a ticket that is not (any more) open at that sender."""
        if not self.links:
            return
        link, name = self.links[number % len(self.links)], f"t{ticket}"
        if name in link.sender.open_tickets:
            return
        bodies: dict[str, Any] = {"ready": Ready(), "failed": Failed(reason="stale"), "cancelled": Cancelled()}
        link.sender.acknowledge(HandoffAck(ticket=name, **{kind: bodies[kind]}))

    def foreign(self, number: int, begin: bool, ticket: int) -> None:
        """Another link names a ticket that is not its own, and does not become its own."""
        if len(self.links) < 2 or not self.asked:
            return
        link, asked = self.links[number % len(self.links)], self.asked[ticket % len(self.asked)]
        name = asked.stream.ticket
        if link.sender.busy or name in link.served or not asked.events.said:
            return
        body: dict[str, Any] = {"abort": Abort(reason="foreign")}
        if begin and asked.stream.seq is not None:
            cached, whole = asked.stream.seq.cached_tokens, asked.stream.seq.num_prefill
            body = {"begin": Begin(first_token=cached, num_tokens=whole - cached)}
        link.foreign.add(name)
        link.to_decode.append(HandoffMessage(ticket=name, **body))

    # -- what the engines ask ------------------------------------------------------------------------------------

    def cancel(self, link_id: str, ticket: str) -> None:
        """LinkControl."""
        for link in self.links:
            if link.link_id == link_id and not link.gone:
                link.receiver.cancel(ticket)

    def fail(self, link_id: str, ticket: str, reason: str) -> None:
        """LinkControl."""
        for link in self.links:
            if link.link_id == link_id and not link.gone:
                link.receiver.fail(ticket, reason)

    def ended(self, link: FuzzLink, ticket: str, failure: str | None) -> None:
        """The sender's last word on a ticket, which comes only when none of its bytes are on the wire."""
        if link.sender._outbox.must_send(ticket):
            self.faults.append(f"{ticket}: ended while its bytes are still to be sent")
        self.told_prefill[ticket] += 1
        link.refs.pop(ticket, None)
        self.p_inbox.append(lambda: self.p_engine.handoff_ended(ticket, failure, self.now))

    def _on_ready(self, ticket: str, state: State, draft: Any) -> None:
        self.d_inbox.append(lambda: self.d_engine.handoff_ready(ticket, state, draft))

    def _on_failed(self, ticket: str, reason: str) -> None:
        self.d_inbox.append(lambda: self.d_engine.handoff_failed(ticket, reason))

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let every deadline pass and every link end; nothing may be left to do."""
        for _ in range(6):
            for _ in range(400):
                if not self.pump(1):
                    break
            else:
                self.faults.append("it never comes to rest")
            self.advance(ANSWER_S + 1)
        for link in self.links:
            link.sender.link_lost("over")
            link.receiver.link_lost("over")
        for _ in range(400):
            if not self.pump(1):
                break

    def close(self) -> None:
        self._stack.close()

    def _reserved(self, number: int) -> Asked | None:
        """One that has its reservation: one that still waits for its rows, if there is any."""
        known = [
            asked
            for asked in self.asked
            if not asked.stream.local_prefill
            and any(not isinstance(e, PacelineError) and e.HasField("reserved") for e in asked.events.said[:1])
        ]
        known = [asked for asked in known if asked.stream.phase is StreamPhase.RESERVED] or known
        return known[number % len(known)] if known else None

    def _link(self, newest: bool) -> FuzzLink | None:
        alive = [link for link in self.links if link.sender.alive]
        if (not alive or (newest and len(alive) < 2)) and len(self.links) < MAX_LINKS:
            alive.append(FuzzLink(self, f"link-{len(self.links)}"))
            self.links.append(alive[-1])
        return alive[-1 if newest else 0] if alive else None
