"""What a stream has received, which is all that another router needs to be told to go on with it."""

from __future__ import annotations

import secrets

from paceline.errors import PacelineError
from paceline.v1 import inference_pb2

GENERATION_ID_BYTES = 16  # an idempotency key that is a capability too: nobody may guess it


class StreamProgress:
    """The request of one stream, and what came of it so far. Memory: the token ids."""

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        """The request is given its generation id."""
        request.generation_id = request.generation_id or secrets.token_hex(GENERATION_ID_BYTES)
        self.request = request
        self._resumable: inference_pb2.Resumable | None = None
        self._token_ids: dict[int, list[int]] = {}
        self._num_prompt_logprobs: dict[int, int] = {}
        self._complete: set[int] = set()
        self._num_calls: dict[int, int] = {}
        self._choices = request.sampling.n if request.sampling.HasField("n") else 1

    @property
    def name(self) -> str:
        """What logs call the stream: the id of its request where it was given one."""
        return self.request.request_id or "a stream"

    @property
    def started(self) -> bool:
        """Whether anything was received."""
        return bool(self._token_ids)

    @property
    def complete(self) -> bool:
        """Whether every choice was received to its end."""
        return len(self._complete) == self._choices

    def take(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Count a chunk as received. PacelineError when it is not the next one: it must not be handed out."""
        token_ids = self._token_ids.setdefault(chunk.choice, [])
        if chunk.first_index != len(token_ids) or chunk.choice in self._complete:
            raise PacelineError(
                f"choice {chunk.choice}: the router went on with token {chunk.first_index}, not {len(token_ids)}"
            )
        self._check_calls(chunk)
        if chunk.HasField("resumable") and self._resumable is None:
            self._resumable = chunk.resumable
        token_ids.extend(chunk.token_ids)
        had = self._num_prompt_logprobs.get(chunk.choice, 0)
        self._num_prompt_logprobs[chunk.choice] = had + len(chunk.prompt_logprobs)
        if chunk.HasField("completion"):
            self._complete.add(chunk.choice)

    def _check_calls(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Calls begin once, in the order of their indices. PacelineError for one that begins again, or goes on without
        a beginning: a router that goes on with a stream may have missed where it was."""
        for part in chunk.tool_calls:
            begun = self._num_calls.get(chunk.choice, 0)
            begins = bool(part.id or part.name)
            if begins and part.index != begun:
                raise PacelineError(f"choice {chunk.choice}: the router began tool call {part.index}, not {begun}")
            if not begins and part.index >= begun:
                raise PacelineError(f"choice {chunk.choice}: the router went on with tool call {part.index} of {begun}")
            self._num_calls[chunk.choice] = begun + begins

    def resuming(self) -> inference_pb2.GenerateRequest:
        """The request for what is missing."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self.request)
        request.resume.SetInParent()
        if self._resumable is not None:
            request.generation_id = self._resumable.generation_id
            request.sampling.seed = self._resumable.seed
            request.resume.plan_digest = self._resumable.plan_digest
        for choice, token_ids in self._token_ids.items():
            request.resume.choices.add(
                choice=choice,
                next_index=len(token_ids),
                token_ids=token_ids,
                complete=choice in self._complete,
                num_prompt_logprobs=self._num_prompt_logprobs[choice],
            )
        return request
