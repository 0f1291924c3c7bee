"""Going on with a stream that another router began (docs/internals/architecture.md#a-router-dies).

The request comes from the journal, or from the client's own copy; both are planned like any other, and the digest of
the plan says whether it is the one that was admitted. What the client has is either given back as tokens, by itself or
by who knows them (`recall.py`), which the nodes take like a replay, or made again silently; either way the text goes on
at the next index.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cluster.access.caller import unknown_id
from cluster.contract import public_wire
from cluster.contract.generation import Chat, GenerationRequest, ReceivedChoice, Resume, check_generation_id
from cluster.contract.plan import Plan
from cluster.routing.told import ToldTokens
from cluster.state.journal import Journal, journal_key
from paceline.errors import InvalidRequest, NodeUnavailable, PacelineError
from paceline.request import MAX_N
from paceline.results import Chunk

log = logging.getLogger(__name__)

NOTHING: Mapping[int, ReceivedChoice] = {}


class UnknownGeneration(PacelineError):
    """The request of a generation is not known (any more), so nobody can go on with it. NOT_FOUND."""


@contextmanager
def journaled(
    journal: Journal | None, plan: Plan, request: GenerationRequest, received: Mapping[int, ReceivedChoice]
) -> Iterator[Callable[[Chunk], None]]:
    """What another router needs is in the journal while a stream runs, and for a while after: the plan of one with a
    generation id, and the tokens of one whose client cannot send them back. Each chunk is to be given to what this
    yields before it is told. received: what the client of a resumed stream has.

    A stream that ends in any other way than complete may be gone on with: a client that left and a connection that
    broke look the same from here."""
    if journal is None:
        yield _untold
        return
    kept, told = None, ToldTokens(journal, plan, received) if request.keeps_told else None
    if request.generation_id:
        key = journal_key(plan.admitted.tenant, request.generation_id)
        kept = journal.keep(key, public_wire.journal_entry(plan.admitted))
    complete = False
    try:
        yield _untold if told is None else told.note
        complete = True
    finally:
        if kept is not None:
            journal.release(kept, complete=complete)
        if told is not None:
            told.end(complete=complete)


def _untold(chunk: Chunk) -> None:
    """The client keeps its tokens itself, or nobody goes on with its stream."""


async def find_admitted(request: GenerationRequest, journal: Journal | None) -> GenerationRequest:
    """The request that ``request.resume`` goes on with, still to be planned.

    Raises UnknownGeneration when neither the journal has it nor the client sent it, NodeUnavailable when the journal
    does not say and the client did not send it, InvalidRequest for an id that is none.
    """
    resume = request.resume
    assert resume is not None
    check_generation_id(request.generation_id)
    own_copy = bool(request.prompt.messages if isinstance(request.prompt, Chat) else request.prompt)
    try:
        stored = await _read(request, journal)
    except NodeUnavailable:
        if not own_copy:
            raise
        stored = None
    if stored is not None:
        digest = public_wire.plan_digest(stored)
        if resume.plan_digest in (b"", digest):
            log.info("%s goes on here, from the journal", stored.request_id)
            return replace(stored, generation_id=request.generation_id, resume=Resume(digest, resume.choices))
    if not own_copy:
        raise _unknown(
            f"generation {request.generation_id!r} is not in the journal: it expired, was never there, or is another "
            "tenant's; send the request with the resume to have it made again"
        )
    log.info("a stream goes on here from the client's own copy of its request")
    return request


def _unknown(text: str) -> UnknownGeneration:
    unknown_id("stream")
    return UnknownGeneration(text)


async def _read(request: GenerationRequest, journal: Journal | None) -> GenerationRequest | None:
    if journal is None or not request.generation_id:
        return None
    entry = await journal.read(journal_key(request.tenant, request.generation_id))
    try:
        return None if entry is None else public_wire.from_journal_entry(entry)
    except InvalidRequest as error:  # a router of a newer build goes on with it
        raise NodeUnavailable(f"the journal's copy of the request: {error}") from None


def received_of(
    plan: Plan, request: GenerationRequest, vocab_size: int, replayable: bool
) -> Mapping[int, ReceivedChoice]:
    """What the client has, by choice; all of it checked. replayable: the same request makes the same tokens, whatever
    is drafted; else they must come from the client.

    Raises UnknownGeneration when the plan is not the one that was admitted, InvalidRequest.
    """
    resume = request.resume
    if resume is None:
        return NOTHING
    if (resume.plan_digest or resume.choices) and resume.plan_digest != public_wire.plan_digest(plan.admitted):
        raise _unknown(
            f"generation {request.generation_id!r} is not in the journal, and the request sent with the resume is not "
            "the one that was admitted (its seed and plan_digest are on the first chunk of the stream)"
        )
    found: dict[int, ReceivedChoice] = {}
    for received in resume.choices:
        _check(received, plan, vocab_size, replayable)
        if received.choice in found:
            raise InvalidRequest("resume.choices", f"choice {received.choice} is there twice")
        found[received.choice] = received
    return found


def _check(received: ReceivedChoice, plan: Plan, vocab_size: int, replayable: bool) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise InvalidRequest("resume.choices", f"choice {received.choice}: {what}")

    have, tokens = received.next_index, received.token_ids
    require(received.choice < len(plan.sequences) <= MAX_N, f"there are {len(plan.sequences)}")
    require(have <= plan.sequences[0].params.max_tokens, f"next_index {have} is above max_tokens")
    require(len(tokens) in (0, have), f"{len(tokens)} tokens are not those before next_index {have}")
    require(all(0 <= token_id < vocab_size for token_id in tokens), "a token id is outside the vocabulary")
    params, last = plan.sequences[0].params, plan.num_prompt_tokens - 1
    entries = last if params.prompt_logprobs is not None else 0
    require(received.num_prompt_logprobs <= entries, f"there are {entries} log-probabilities of the prompt")
    # Never sent after a token, so a client that has one has them all.
    require(
        have == 0 or received.num_prompt_logprobs == entries, "tokens come after all log-probabilities of the prompt"
    )
    needs_tokens = have > 0 and not tokens and not received.complete
    require(replayable or not needs_tokens, "token_ids are needed: this acceptance rule does not make them again")
