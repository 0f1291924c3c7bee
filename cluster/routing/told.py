"""The tokens that a client was told, kept in the journal for whichever router goes on with its stream.

Server-sent events cannot bring their tokens back, so the router that tells them keeps them, and another one replays
them as a prompt. The entry is named by the plan's digest: the same plan makes the same tokens, so a router finds none
but those that it would make itself. Where there is no entry, or an older one, the nodes make the rest again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from google.protobuf.message import DecodeError

from cluster.contract.generation import ReceivedChoice
from cluster.contract.plan import Plan
from cluster.contract.public_wire import plan_digest
from cluster.state.journal import Journal, Kept
from paceline.errors import NodeUnavailable
from paceline.results import Chunk
from paceline.v1 import inference_pb2
from paceline.wire import logprobs_from_proto, logprobs_to_proto

log = logging.getLogger(__name__)

LEAST_WAIT_S, MOST_WAIT_S = 0.5, 2.0  # for a journal that cannot be read
A_TOKEN_S = 0.02  # of that wait for each token of a choice: a few are made sooner than waited for
FEW_TOKENS = 16  # that are told before they are written
SHARE = 8  # and one of so many of those before
OFTEN_S, BYTES_A_SECOND = 1.0, 4096  # a stream that is slow is written once a second, a long one less often


class ToldTokens:
    """What the clients of one stream have been told. ``end`` it."""

    def __init__(self, journal: Journal, plan: Plan, received: Mapping[int, ReceivedChoice]) -> None:
        """received: what the client of a resumed stream has, with its tokens where they are known."""
        self._journal, self._key = journal, _key(journal, plan)
        self._kept: Kept | None = None
        self._message = inference_pb2.GenerateResponse()
        self._choices = [self._message.choices.add(index=index) for index in range(len(plan.sequences))]
        for had in received.values():
            self._choices[had.choice].token_ids.extend(had.token_ids)
            self._choices[had.choice].logprobs.extend(logprobs_to_proto(entry) for entry in had.logprobs)
        self._num_tokens = sum(len(choice.token_ids) for choice in self._choices)
        self._least = sum(had.next_index for had in received.values())  # an earlier router's entry may have so many
        self._num_written, self._bytes, self._written_at = self._num_tokens, 0, time.monotonic()
        self._given_up = False  # the journal has no room for it

    def note(self, chunk: Chunk) -> None:
        """A chunk is about to be told."""
        choice = self._choices[chunk.choice]
        known = len(choice.token_ids) - chunk.first_index
        if self._given_up or known < 0:
            return
        new = chunk.token_ids[known:]
        choice.token_ids.extend(new)
        choice.logprobs.extend(logprobs_to_proto(entry) for entry in chunk.logprobs[known:])
        self._num_tokens += len(new)
        if self._is_due():
            self._write()

    def _is_due(self) -> bool:
        new = self._num_tokens - self._num_written
        if new >= max(FEW_TOKENS, self._num_written // SHARE):
            return True
        pause_s = max(OFTEN_S, self._bytes / BYTES_A_SECOND)
        return new > 0 and time.monotonic() - self._written_at >= pause_s

    def _write(self) -> None:
        if self._kept is not None and not self._journal.holds(self._kept):
            self._give_up()
        if self._num_tokens < max(self._least, 1) or self._given_up:
            return
        entry = self._message.SerializeToString()
        self._num_written, self._bytes, self._written_at = self._num_tokens, len(entry), time.monotonic()
        if self._kept is not None:
            self._journal.update(self._kept, entry)
            return
        self._kept = self._journal.keep(self._key, entry, spare=True)
        if self._kept is None:
            self._give_up()

    def _give_up(self) -> None:
        """Nothing is packed for a journal that does not keep it, nor held here."""
        self._given_up = True
        self._message.Clear()

    def end(self, *, complete: bool) -> None:
        """The stream is over; ``complete``: to its end."""
        self._write()
        if self._kept is not None:
            self._journal.release(self._kept, complete=complete)


async def recall(
    journal: Journal | None, plan: Plan, received: Mapping[int, ReceivedChoice]
) -> Mapping[int, ReceivedChoice]:
    """``received`` with the first of its tokens, as many as are known. Unchanged where the journal does not say."""
    if journal is None or not any(had.next_index > len(had.token_ids) for had in received.values()):
        return received
    try:
        entry = await journal.read_patiently(_key(journal, plan), _patience_s(received))
        found = inference_pb2.GenerateResponse.FromString(entry or b"")
    except (NodeUnavailable, DecodeError) as error:
        log.info("%s: its tokens are made again: %s", plan.request_id, error)
        return received
    by_index = {choice.index: choice for choice in found.choices}
    recalled = {index: _filled(had, by_index.get(index), plan) for index, had in received.items()}
    known, asked = (sum(of(had) for had in recalled.values()) for of in (_known, _asked))
    log.info("%s: %d of the %d tokens that its client has are known", plan.request_id, known, asked)
    return recalled


def _patience_s(received: Mapping[int, ReceivedChoice]) -> float:
    """How long the tokens that are not known are worth waiting for. Choices are made side by side."""
    most = max(_asked(had) - _known(had) for had in received.values())
    return min(max(LEAST_WAIT_S, most * A_TOKEN_S), MOST_WAIT_S)


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
