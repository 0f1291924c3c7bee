"""One try of one choice on one pair of nodes (docs/internals/architecture.md#a-request).

    Decode -> Reserved -> Prefill -> PromptLogprobs ... -> FirstToken -> the client | HandedOff | Tokens ... -> Finished

The first token comes from prefill and goes out at once; decode's tokens may overtake it and wait for it. Everything
that goes wrong is a NodeFailure, after which nothing of this attempt is used but the tokens already sent. However an
attempt ends, both calls are closed, which gives the nodes' pages back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from cluster.routing.bypass import Bypass
from cluster.routing.choice import ChoiceRun, rounds_after, rounds_within
from cluster.routing.metrics import Metrics
from cluster.routing.node_calls import NodeCalls, NodeFailure, NodeStream
from cluster.state.registry_types import NodeRecord
from paceline.errors import HandoffFailed, InvalidRequest, NodeUnavailable, Overloaded, PacelineError
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import Chunk, HandoffBytes, Round, ServedBy
from paceline.v1 import node_pb2
from paceline.wire import finish_reason_from_proto, logprobs_from_proto, round_from_proto, sequence_to_proto

SETTLE_S = 1.0  # longest wait for the hand-off's numbers once the text is complete
CULPRIT_S = 0.2  # a failed hand-off: how long the other node has to show that it was the one
NODE_MARGIN_S = 5.0  # nodes give up by themselves this long after the router's own deadline

PrefillStream = NodeStream[node_pb2.PrefillEvent]
DecodeStream = NodeStream[node_pb2.DecodeEvent]


@dataclass(frozen=True)
class Pair:
    """Who serves an attempt; without a prefill node, decode computes the prompt itself."""

    decode: NodeRecord
    prefill: NodeRecord | None
    decode_hint: int = 0  # tokens of the prompt that it is thought to have cached
    prefill_hint: int = 0


@dataclass(frozen=True)
class Shared:
    """What attempts share."""

    calls: NodeCalls
    metrics: Metrics
    nodes: Callable[[], list[NodeRecord]]  # the registry's view
    lease_ttl_s: float
    tell_every_s: float  # tokens of a sequence; 0: each round by itself
    bypass: Bypass


class Attempt:
    """Made, then ``run`` once."""

    def __init__(
        self,
        choice: ChoiceRun,
        pair: Pair,
        shared: Shared,
        emit: Callable[[Chunk], Awaitable[None]],
        deadline: float,
    ) -> None:
        """emit: takes chunks, waits when the client is slow. deadline: monotonic clock.

        ``pair`` becomes the decode node alone where that computes the prompt itself, and the prefill node alone where
        nothing is left to decode.
        """
        if choice.wants_prompt_logprobs:  # cached rows do not help the node that computes the prompt
            pair = replace(pair, prefill_hint=0)
        self._choice, self.pair, self._shared, self._emit = choice, pair, shared, emit
        self._timeout_s = max(0.0, deadline - time.monotonic()) + NODE_MARGIN_S
        self._handed_off = False
        self._counted = False  # the hand-off's numbers
        self._heard_at = time.monotonic()
        self._reserved_at: float | None = None  # until the first token, where the way to it is measured
        self._uncached = 0  # tokens to compute before the first token

    async def run(self) -> None:
        """Until the choice has its finish reason. Raises NodeFailure."""
        pair = self.pair
        began, outcome = time.monotonic(), "left"
        self._choice.nodes = ServedBy((pair.prefill or pair.decode).id, pair.decode.id)
        try:
            async with asyncio.timeout(None) as silence:
                watch = asyncio.create_task(self._watch(silence))
                try:
                    await self._serve()
                    outcome = "ok"
                finally:
                    watch.cancel()
        except TimeoutError:
            outcome, lost = "silent", self._lost() or self.pair.decode
            raise NodeFailure(lost, NodeUnavailable(f"{lost.id} lost its lease and is silent"), gone=True) from None
        except NodeFailure as failure:
            outcome = str(failure)
            raise
        finally:
            nodes = self._choice.nodes
            ended = time.monotonic()
            self._choice.trace.record(
                "attempt",
                began,
                ended,
                prefill=nodes.prefill,
                decode=nodes.decode,
                outcome=outcome,
                prefill_hint_tokens=pair.prefill_hint,
                decode_hint_tokens=pair.decode_hint,
            )

    async def _serve(self) -> None:
        sequence = self._choice.for_nodes()
        if self.pair.prefill is not None and self._choice.is_scored_alone:
            await self._score(self.pair.prefill, sequence)
            return
        num_tokens = len(sequence.prompt_token_ids) + len(sequence.output_token_ids)
        decode_node = self.pair.decode
        limit = self._shared.bypass.limit(num_tokens - self.pair.decode_hint, decode_node.running)
        here = sequence
        if self.pair.prefill is not None and sequence.params.prompt_logprobs is not None and num_tokens > limit:
            # The node that computes the prompt tells them, from its first row on: decode may use its cache.
            here, limit = replace(sequence, params=replace(sequence.params, prompt_logprobs=None)), 0
        request = node_pb2.DecodeRequest(
            sequence=sequence_to_proto(here),
            local_prefill=self.pair.prefill is None,
            local_prefill_up_to=limit,
            tell_every_s=self._shared.tell_every_s,
        )
        decode = self._shared.calls.decode(decode_node, request, self._timeout_s)
        try:
            reserved = await self._reservation(decode)
            if self.pair.prefill is not None:
                self._reserved_at, self._uncached = time.monotonic(), num_tokens - reserved.cached_tokens
                if reserved.local_prefill:
                    self._bypass()
            if self.pair.prefill is None:
                await self._relay(decode, None)
            else:
                await self._hand_over(self.pair.prefill, decode, reserved, sequence)
        finally:
            decode.close()

    async def _score(self, node: NodeRecord, sequence: SequenceRequest) -> None:
        """Nothing is left to decode after the first token: the prefill node computes the prompt, and decode has no part
        in it."""
        self.pair = replace(self.pair, decode=node, prefill=None)
        self._choice.nodes = ServedBy(node.id, "")
        request = node_pb2.PrefillRequest(sequence=sequence_to_proto(sequence), alone=True)
        prefill = self._shared.calls.prefill(node, request, self._timeout_s, self.pair.prefill_hint)
        try:
            await self._first_token(prefill, None)
        finally:
            prefill.close()
        self._choice.end(FinishReason.LENGTH)

    def _bypass(self) -> None:
        """Decode computes the prompt itself: the prefill node has no part in this attempt."""
        self.pair = replace(self.pair, prefill=None)
        self._choice.nodes = ServedBy(self.pair.decode.id, self.pair.decode.id)
        self._shared.metrics.bypassed()

    async def _reservation(self, decode: DecodeStream) -> node_pb2.Reserved:
        event = await decode.next()
        if event is None or not event.HasField("reserved"):
            raise NodeFailure(decode.node, PacelineError("the stream did not begin with a reservation"))
        self._choice.trace.record("reserved", ticket=event.reserved.ticket, cached_tokens=event.reserved.cached_tokens)
        self._shared.metrics.prefix_hit("decode", self.pair.decode_hint, event.reserved.cached_tokens)
        return event.reserved

    async def _hand_over(
        self, node: NodeRecord, decode: DecodeStream, reserved: node_pb2.Reserved, sequence: SequenceRequest
    ) -> None:
        request = node_pb2.PrefillRequest(
            sequence=sequence_to_proto(sequence),
            ticket=reserved.ticket,
            decode_address=self.pair.decode.address,
            decode_cached_tokens=reserved.cached_tokens,
            grant=self._shared.calls.grant(
                reserved.ticket, (node.id, self.pair.decode.id), sequence.cache_salt, self._timeout_s
            ),
        )
        prefill = self._shared.calls.prefill(node, request, self._timeout_s, self.pair.prefill_hint)
        try:
            await self._first_token(prefill, decode)
            if self._choice.finish_reason is None:
                await self._relay(decode, prefill)
            decode.close()  # gives its pages back while the numbers are waited for
            await self._settle(prefill)
        finally:
            prefill.close()

    # -- the first token ---------------------------------------------------------------------------------------

    async def _first_token(self, prefill: PrefillStream, decode: DecodeStream | None) -> None:
        """Wait for the first token and send it, and before it what is told of the prompt. Decode failing first ends the
        wait."""
        event = await self._next_of_prefill(prefill, decode)
        while event is not None and event.HasField("prompt_logprobs"):
            await self._take_prompt_logprobs(prefill.node, event.prompt_logprobs)
            event = await self._next_of_prefill(prefill, decode)
        if event is None or not event.HasField("first_token"):
            raise NodeFailure(prefill.node, PacelineError("the stream did not begin with a first token"))
        prefill.computed()
        first = event.first_token
        self._shared.metrics.prefix_hit("prefill", self.pair.prefill_hint, first.cached_tokens)
        if self._choice.cached_tokens is None:
            self._choice.cached_tokens = first.cached_tokens
        tokens = node_pb2.Tokens(first_index=len(self._choice.token_ids), token_ids=[first.token_id])
        if first.HasField("logprobs"):
            tokens.logprobs.append(first.logprobs)
        await self._take(prefill.node, tokens)
        reason = finish_reason_from_proto(first.finish_reason)
        if reason is not None:
            self._choice.end(reason)

    async def _next_of_prefill(
        self, prefill: PrefillStream, decode: DecodeStream | None
    ) -> node_pb2.PrefillEvent | None:
        if decode is not None:
            await asyncio.wait({prefill.read_ahead(), decode.read_ahead()}, return_when=asyncio.FIRST_COMPLETED)
            if not prefill.read_ahead().done() and (failure := await decode.failure_within(0)):
                raise await self._blame(failure, prefill)
        return await self._prefill_event(prefill, decode)

    async def _prefill_event(self, prefill: PrefillStream, decode: DecodeStream | None) -> node_pb2.PrefillEvent | None:
        try:
            event = await prefill.next()
        except NodeFailure as failure:
            if decode is None:
                raise
            raise await self._blame(failure, decode) from None
        self._heard_at = time.monotonic()
        return event

    async def _blame(self, failure: NodeFailure, other: PrefillStream | DecodeStream) -> NodeFailure:
        """What to report of a failed hand-off. A node's error may be about its peer: the one that is gone is to blame.
        When none is, it is the prefill node, since decode can do without."""
        if failure.gone or isinstance(failure.error, (InvalidRequest, Overloaded)):
            return failure
        peer = await other.failure_within(CULPRIT_S)
        if peer is not None and peer.gone:
            return peer
        if self.pair.prefill is not None and isinstance(failure.error, HandoffFailed):
            return NodeFailure(self.pair.prefill, failure.error)
        return failure

    # -- the rest ----------------------------------------------------------------------------------------------

    async def _relay(self, decode: DecodeStream, prefill: PrefillStream | None) -> None:
        """Send on what decode commits until the choice ends."""
        while self._choice.finish_reason is None:
            event = await self._decode_event(decode, prefill)
            if event is None:
                raise NodeFailure(decode.node, PacelineError("the stream ended without a finish reason"))
            if event.HasField("prompt_logprobs"):
                await self._take_prompt_logprobs(decode.node, event.prompt_logprobs)
            elif event.HasField("tokens"):
                if prefill is None and self._choice.cached_tokens is None:
                    self._choice.cached_tokens = event.tokens.cached_tokens
                await self._take(decode.node, event.tokens)
            elif event.HasField("finished"):
                reason = finish_reason_from_proto(event.finished.finish_reason)
                self._choice.end(reason or FinishReason.ABORT)

    async def _decode_event(self, decode: DecodeStream, prefill: PrefillStream | None) -> node_pb2.DecodeEvent | None:
        """The next event of decode; until its first one, a failure of the hand-off ends the wait."""
        if prefill is not None and not self._handed_off:
            waits = {decode.read_ahead(), prefill.read_ahead()}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not decode.read_ahead().done():
                self._note_handoff(await self._prefill_event(prefill, decode))
        try:
            event = await decode.next()
        except NodeFailure as failure:
            if prefill is None or self._handed_off:
                raise
            raise await self._blame(failure, prefill) from None
        self._heard_at = time.monotonic()
        self._handed_off = True  # decode has all it needs; whatever becomes of prefill no longer matters
        return event

    async def _take(self, node: NodeRecord, tokens: node_pb2.Tokens) -> None:
        """Take tokens and send what is new of them."""
        rounds = [round_from_proto(one) for one in (tokens.rounds or [tokens.round] * tokens.HasField("round"))]
        logprobs = [logprobs_from_proto(entry) for entry in tokens.logprobs]
        first, token_ids = tokens.first_index, tokens.token_ids
        for part in self._choice.cut(first, len(token_ids)):
            here = slice(part.start, part.stop)
            last = part.stop == len(token_ids)
            made_by = rounds_after(rounds, part.start) if last else rounds_within(rounds, part.stop)
            await self._take_part(node, first + part.start, token_ids[here], logprobs[here], made_by)
            if self._choice.finish_reason is not None:  # a stop string: no token may follow
                return

    async def _take_part(
        self,
        node: NodeRecord,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: list[TokenLogprobs],
        rounds: Sequence[Round],
    ) -> None:
        choice = self._choice
        before, since = choice.first_token_at, choice.last_token_at
        try:
            chunk = choice.take(first_index, token_ids, logprobs, rounds)
        except HandoffFailed as error:
            raise NodeFailure(node, error) from None
        if chunk is None:
            return
        if self._reserved_at is not None:
            seconds, self._reserved_at = time.monotonic() - self._reserved_at, None
            self._shared.bypass.observe(self._uncached, self.pair.prefill is None, seconds)
        if chunk.retold:
            return await self._emit(chunk)
        name = "first token" if before is None else "tokens"
        choice.trace.record(name, choice.last_token_at, index=chunk.first_index, tokens=len(chunk.token_ids))
        if before is None:
            self._shared.metrics.first_token(choice.last_token_at - since)
        else:
            self._shared.metrics.tokens(len(chunk.token_ids), choice.last_token_at - since)
        await self._emit(chunk)

    async def _take_prompt_logprobs(self, node: NodeRecord, message: node_pb2.PromptLogprobs) -> None:
        """Send what is new of the prompt's log-probabilities."""
        logprobs = [logprobs_from_proto(entry) for entry in message.logprobs]
        try:
            chunk = self._choice.take_prompt_logprobs(message.first_position, logprobs)
        except HandoffFailed as error:
            raise NodeFailure(node, error) from None
        if chunk is not None:
            await self._emit(chunk)

    # -- the hand-off's numbers --------------------------------------------------------------------------------

    def _note_handoff(self, event: node_pb2.PrefillEvent | None) -> None:
        self._handed_off = True
        if event is None or not event.HasField("handed_off"):
            return
        self._counted = True
        counts = event.handed_off.bytes
        handoff = HandoffBytes(counts.target_kv, counts.draft_kv, counts.hidden, counts.meta)
        self._choice.add_handoff(handoff)
        exposed_s, transfer_s = event.handed_off.exposed_s, event.handed_off.transfer_s
        self._choice.trace.record("handed off", exposed_s=exposed_s, transfer_s=transfer_s)
        self._shared.metrics.handed_off(handoff, exposed_s, transfer_s)

    async def _settle(self, prefill: PrefillStream) -> None:
        """The text is complete; wait a little for the hand-off's numbers when they are still to come."""
        if self._counted:
            return
        task = prefill.read_ahead()
        await asyncio.wait({task}, timeout=SETTLE_S)
        if task.done() and not task.cancelled() and task.exception() is None:
            self._note_handoff(task.result())

    # -- silence -----------------------------------------------------------------------------------------------

    def _lost(self) -> NodeRecord | None:
        """A node of the pair that the registry no longer has in this generation."""
        alive = {(node.id, node.generation) for node in self._shared.nodes()}
        pair = (self.pair.decode, self.pair.prefill)
        return next((node for node in pair if node is not None and (node.id, node.generation) not in alive), None)

    async def _watch(self, silence: asyncio.Timeout) -> None:
        """A node that stopped without closing its connection loses its lease: do not wait for TCP to notice. A node
        that still talks keeps its streams, whatever the registry says."""
        ttl = self._shared.lease_ttl_s
        silent_s = ttl + self._shared.tell_every_s  # one that tells rounds together is heard so much less often
        lost_since: float | None = None
        while True:
            await asyncio.sleep(ttl / 4)
            now = time.monotonic()
            if self._lost() is None:
                lost_since = None
            elif lost_since is None:
                lost_since = now
            elif now - max(lost_since, self._heard_at) > silent_s:
                silence.reschedule(asyncio.get_running_loop().time())
                return
