"""The tokens that a client was told, kept in the journal for whichever router goes on with its stream.

Server-sent events cannot bring their tokens back, so the router that tells them keeps them, and another one replays
them as a prompt. The entry is named by the plan's digest: the same plan makes the same tokens, so a router finds none
but those that it would make itself. Where there is no entry, or an older one, the nodes make the rest again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from cluster.contract.generation import ReceivedChoice
from cluster.contract.plan import Plan
from cluster.contract.public_wire import plan_digest
from cluster.state.journal import Journal
from paceline.errors import NodeUnavailable
from paceline.results import Chunk
from paceline.v1 import inference_pb2
from paceline.wire import logprobs_from_proto, logprobs_to_proto

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 0.5  # making tokens again is no worse than waiting for long
FEW_TOKENS = 16  # that are told before they are written
SHARE = 8  # and one of so many of those before: what is written stays below nine times what is told


class ToldTokens:
    """What the clients of one stream have been told. ``end`` it."""

    def __init__(self, journal: Journal, plan: Plan, received: Mapping[int, ReceivedChoice]) -> None:
        """received: what the client of a resumed stream has, with its tokens where they are known."""
        self._journal = journal
        self._message = inference_pb2.GenerateResponse()
        self._choices = [self._message.choices.add(index=index) for index in range(len(plan.sequences))]
        for had in received.values():
            self._choices[had.choice].token_ids.extend(had.token_ids)
            self._choices[had.choice].logprobs.extend(logprobs_to_proto(entry) for entry in had.logprobs)
        self._num_tokens = sum(len(choice.token_ids) for choice in self._choices)
        self._due_at = self._num_tokens + FEW_TOKENS
        self._kept = journal.keep(_key(journal, plan), self._message.SerializeToString())

    def note(self, chunk: Chunk) -> None:
        """A chunk is about to be told."""
        choice = self._choices[chunk.choice]
        known = len(choice.token_ids) - chunk.first_index
        if self._kept is None or known < 0:
            return
        choice.token_ids.extend(chunk.token_ids[known:])
        choice.logprobs.extend(logprobs_to_proto(entry) for entry in chunk.logprobs[known:])
        self._num_tokens += len(chunk.token_ids[known:])
        if self._num_tokens >= self._due_at:
            self._due_at = self._num_tokens + max(FEW_TOKENS, self._num_tokens // SHARE)
            self._write()

    def _write(self) -> None:
        if self._kept is not None:
            self._journal.update(self._kept, self._message.SerializeToString())

    def end(self, *, complete: bool) -> None:
        """The stream is over; ``complete``: to its end."""
        if self._kept is not None:
            self._write()
            self._journal.release(self._kept, complete=complete)


async def recall(
    journal: Journal | None, plan: Plan, received: Mapping[int, ReceivedChoice]
) -> Mapping[int, ReceivedChoice]:
    """``received`` with the first of its tokens, as many as are known. Unchanged where the journal does not say."""
    if journal is None or not any(had.next_index > len(had.token_ids) for had in received.values()):
        return received
    try:
        entry = await journal.read(_key(journal, plan), READ_TIMEOUT_S)
        found = inference_pb2.GenerateResponse.FromString(entry or b"")
    except (NodeUnavailable, DecodeError) as error:
        log.info("%s: its tokens are made again: %s", plan.request_id, error)
        return received
    by_index = {choice.index: choice for choice in found.choices}
    recalled = {index: _filled(had, by_index.get(index), plan) for index, had in received.items()}
    known, asked = (sum(of(had) for had in recalled.values()) for of in (_known, _asked))
    log.info("%s: %d of the %d tokens that its client has are known", plan.request_id, known, asked)
    return recalled


def _filled(had: ReceivedChoice, found: inference_pb2.Choice | None, plan: Plan) -> ReceivedChoice:
    if found is None or had.token_ids:
        return had
    token_ids = tuple(found.token_ids[: had.next_index])
    logprobs = tuple(logprobs_from_proto(entry) for entry in found.logprobs[: len(token_ids)])
    wanted = len(token_ids) if plan.admitted.sampling.top_logprobs is not None else 0
    return replace(had, token_ids=token_ids, logprobs=logprobs) if len(logprobs) == wanted else had


def _known(had: ReceivedChoice) -> int:
    return len(had.token_ids)


def _asked(had: ReceivedChoice) -> int:
    return had.next_index


def _key(journal: Journal, plan: Plan) -> str:
    return journal.seal.name("told", plan_digest(plan.admitted))
