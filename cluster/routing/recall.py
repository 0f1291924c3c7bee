"""The tokens that a client was told and cannot send back, from whoever knows them: the journal, and the decode nodes
that made them.

The router that told them may be gone, Redis may be hurt, empty or behind, a node may be lost. All are asked at once,
each is right about what it knows, and what nobody knows in time is made again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from cluster.contract.generation import ReceivedChoice
from cluster.contract.plan import Plan
from cluster.routing.node_calls import NodeCalls, NodeFailure
from cluster.routing.told import told_key
from cluster.state.journal import Journal
from cluster.state.registry_types import NodeRecord
from paceline.errors import NodeUnavailable
from paceline.v1 import inference_pb2, node_pb2
from paceline.wire import logprobs_from_proto, sequence_digest, sequence_to_proto

log = logging.getLogger(__name__)

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 2.0  # for the first answer
A_TOKEN_S = 0.02  # of that wait for each token of a choice: a few are made sooner than waited for
MAX_NODES = 16  # that are asked for one stream

Received = Mapping[int, ReceivedChoice]
Answer = Sequence[inference_pb2.Choice]
FindNodes = Callable[[Sequence[int], str, int], Sequence[NodeRecord]]


class Recall:
    """Asks for the tokens of one stream after another."""

    def __init__(self, journal: Journal | None, nodes: FindNodes, calls: NodeCalls) -> None:
        """nodes: decode nodes that may have made the tokens of a prompt under a salt, the likely ones first, at most so
        many."""
        self._journal, self._nodes, self._calls = journal, nodes, calls

    async def __call__(self, plan: Plan, received: Received) -> Received:
        """``received`` with the first of its tokens, as many as are known."""
        if not _missing(received):
            return received
        began, answered = time.monotonic(), False
        asking = {asyncio.create_task(ask) for ask in self._whom(plan, received)}
        try:
            while asking and (missing := _missing(received)):
                wait_s = min(missing * A_TOKEN_S, MOST_WAIT_S)
                left_s = began + (wait_s if answered else max(wait_s, LEAST_WAIT_S)) - time.monotonic()
                done, asking = await asyncio.wait(asking, timeout=max(left_s, 0), return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for answer in (task.result() for task in done):
                    answered = answered or answer is not None
                    received = _filled(received, answer or (), plan)
        finally:
            for task in asking:
                task.cancel()
        known = sum(len(had.token_ids) for had in received.values())
        asked = sum(had.next_index for had in received.values())
        log.info("%s: %d of the %d tokens that its client has are known", plan.request_id, known, asked)
        return received

    def _whom(self, plan: Plan, received: Received) -> list[Coroutine[None, None, Answer | None]]:
        whom: list[Coroutine[None, None, Answer | None]] = []
        if self._journal is not None:
            whom.append(self._of_journal(self._journal, plan))
        if plan.admitted.sampling.top_logprobs is not None:  # nodes do not keep log-probabilities
            return whom
        choices = [had.choice for had in received.values() if had.next_index > len(had.token_ids)]
        asked = node_pb2.RecallRequest()
        for choice in choices:
            digest = sequence_digest(sequence_to_proto(plan.sequences[choice]))
            asked.sequences.add(digest=digest, num_tokens=received[choice].next_index)
        first = plan.sequences[0]
        nodes = self._nodes(first.prompt_token_ids, first.cache_salt, MAX_NODES)
        return whom + [self._of_node(node, plan.request_id, choices, asked) for node in nodes]

    async def _of_journal(self, journal: Journal, plan: Plan) -> Answer | None:
        try:
            entry = await journal.read_patiently(told_key(journal, plan), MOST_WAIT_S)
            return inference_pb2.GenerateResponse.FromString(entry or b"").choices
        except (NodeUnavailable, DecodeError) as error:
            log.info("%s: the journal does not say what was told: %s", plan.request_id, error)
            return None

    async def _of_node(
        self, node: NodeRecord, request_id: str, choices: Sequence[int], asked: node_pb2.RecallRequest
    ) -> Answer | None:
        try:
            made = (await self._calls.recall(node, asked, MOST_WAIT_S)).made
        except NodeFailure as failure:
            log.info("%s: what was told is not known from %s", request_id, failure)
            return None
        told = zip(choices, made, strict=False)
        return [inference_pb2.Choice(index=choice, token_ids=of_choice.token_ids) for choice, of_choice in told]


def _missing(received: Received) -> int:
    """Tokens of the choice that lacks most: choices are made side by side."""
    return max((had.next_index - len(had.token_ids) for had in received.values()), default=0)


def _filled(received: Received, answer: Answer, plan: Plan) -> Received:
    by_index = {choice.index: choice for choice in answer}
    return {index: _longer(had, by_index.get(index), plan) for index, had in received.items()}


def _longer(had: ReceivedChoice, found: inference_pb2.Choice | None, plan: Plan) -> ReceivedChoice:
    if found is None or len(found.token_ids) <= len(had.token_ids):
        return had
    token_ids = tuple(found.token_ids[: had.next_index])
    logprobs = tuple(logprobs_from_proto(entry) for entry in found.logprobs[: len(token_ids)])
    wanted = len(token_ids) if plan.admitted.sampling.top_logprobs is not None else 0
    return replace(had, token_ids=token_ids, logprobs=logprobs) if len(logprobs) == wanted else had
