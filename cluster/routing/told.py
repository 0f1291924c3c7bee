"""The tokens that a client was told, kept in the journal for whichever router goes on with its stream (`recall.py`).

Server-sent events cannot bring their tokens back, so the router that tells them keeps them, and another one replays
them as a prompt. The entry is named by the plan's digest: the same plan makes the same tokens, so a router finds none
but those that it would make itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from cluster.contract.generation import ReceivedChoice
from cluster.contract.plan import Plan
from cluster.contract.public_wire import plan_digest
from cluster.state.journal import Journal, Kept
from paceline.results import Chunk
from paceline.v1 import inference_pb2
from paceline.wire import logprobs_to_proto

FEW_TOKENS = 16  # that are told before they are written
SHARE = 8  # and one of so many of those before
OFTEN_S, BYTES_A_SECOND = 1.0, 4096  # a stream that is slow is written once a second, a long one less often


class ToldTokens:
    """What the clients of one stream have been told. ``end`` it."""

    def __init__(self, journal: Journal, plan: Plan, received: Mapping[int, ReceivedChoice]) -> None:
        """received: what the client of a resumed stream has, with its tokens where they are known."""
        self._journal, self._key = journal, told_key(journal, plan)
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


def told_key(journal: Journal, plan: Plan) -> str:
    """Where the journal keeps what was told of a plan."""
    return journal.seal.name("told", plan_digest(plan.admitted))
