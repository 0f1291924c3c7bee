"""Server-sent events that a client can go on with at any router: each has an ``id``, and ``Last-Event-ID`` asks for
what came after it.

The text of an answer depends on its request and seed alone. So an id tells the seed, a digest of the planned request,
and how far each choice was told; the client sends its body again, and nothing has to be kept anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import Request

from cluster.contract.generation import GenerationRequest, ReceivedChoice, Resume
from cluster.contract.plan import Plan
from cluster.contract.public_wire import plan_digest
from cluster.frontdoor.http_errors import HttpProblem
from cluster.frontdoor.openai_parse import ApiRequest
from paceline.errors import InvalidRequest

HEADER = "last-event-id"
MAX_CHOICES = 16  # an id tells of each; a stream of more has none
_ID = re.compile(r"(?P<seed>\d{1,20})\.(?P<digest>[0-9a-f]{32})\.(?P<choices>\d{1,7}c?(-\d{1,7}c?){0,15})(?P<over>u?)")


@dataclass(frozen=True)
class Told:
    """How far a choice was told."""

    num_tokens: int = 0
    complete: bool = False


@dataclass(frozen=True)
class Position:
    """A place in a stream of events: after those of ``choices``, and, when ``over``, after all but ``[DONE]``."""

    seed: int
    digest: bytes
    choices: tuple[Told, ...]
    over: bool = False

    @classmethod
    def of(cls, plan: Plan) -> Position:
        """The beginning of a planned answer."""
        seed = plan.admitted.sampling.seed
        assert seed is not None  # every default is resolved
        return cls(seed, plan_digest(plan.admitted), (Told(),) * len(plan.sequences))

    @classmethod
    def read(cls, event_id: str) -> Position:
        """Raises InvalidRequest for an id that no stream has."""
        found = _ID.fullmatch(event_id)
        if found is None:
            raise InvalidRequest(HEADER, "must be the id of an event of a stream")
        choices = tuple(Told(int(told.rstrip("c")), told.endswith("c")) for told in found["choices"].split("-"))
        return cls(int(found["seed"]), bytes.fromhex(found["digest"]), choices, bool(found["over"]))

    def __str__(self) -> str:
        told = "-".join(f"{told.num_tokens}{'c' if told.complete else ''}" for told in self.choices)
        return f"{self.seed}.{self.digest.hex()}.{told}{'u' if self.over else ''}"

    def at(self, choices: Sequence[Told], over: bool) -> Position:
        """A later place of the same stream."""
        return replace(self, choices=tuple(choices), over=over)

    def rest_of(self, generation: GenerationRequest) -> GenerationRequest:
        """``generation`` from here on. Raises InvalidRequest when the id is not one of such a request."""
        seed, n = generation.sampling.seed, generation.sampling.n
        if seed not in (None, self.seed) or n != len(self.choices):
            raise InvalidRequest(HEADER, "is of another request than the body")
        received = tuple(
            ReceivedChoice(i, told.num_tokens, complete=told.complete) for i, told in enumerate(self.choices)
        )
        sampling = replace(generation.sampling, seed=self.seed)
        return replace(generation, sampling=sampling, resume=Resume(self.digest, received, retell=True))


def can_resume(request: ApiRequest) -> bool:
    """Whether events of the answer have ids: not where it tells of the prompt, or of many prompts or choices."""
    told_of_prompt = request.echo or request.generation.sampling.prompt_logprobs is not None
    few = not request.more and request.generation.sampling.n <= MAX_CHOICES
    return request.stream and few and not told_of_prompt


def last_event_id(request: Request, resumable: bool) -> str | None:
    """The id of the event up to which the client has a stream; None when it begins one. Raises InvalidRequest where no
    stream can be resumed."""
    event_id = request.headers.get(HEADER)
    if event_id is not None and not resumable:
        raise InvalidRequest(HEADER, "this request makes no stream that can be resumed")
    return event_id


def position_of(request: Request, resumable: bool) -> Position | None:
    """What the client has of a stream; None when it begins one. Raises InvalidRequest."""
    event_id = last_event_id(request, resumable)
    return None if event_id is None else Position.read(event_id)


def not_the_same(error: Exception) -> HttpProblem:
    """The answer where the body makes another text than the one that the client has the beginning of."""
    message = f"{HEADER}: the stream cannot be resumed with this body, or by this deployment: {error}"
    return HttpProblem(409, message, param=HEADER, code="not_resumable")
