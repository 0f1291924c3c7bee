"""Turns what the router yields into bodies and stream events of OpenAI's API.

The last thing a client gets, a body or the last event, carries what OpenAI's shape has no place for: ``paceline``, with
speculation, timing, nodes, handoff and seed of the first choice, the token ids of every choice, and with ``n > 1``
the details of each choice.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from cluster.contract.plan import Plan
from cluster.frontdoor.openai_answers import PromptDetails, Usage
from cluster.frontdoor.openai_logprobs import Placed, Placing, chat_logprobs, completions_logprobs
from cluster.frontdoor.openai_parse import ApiRequest
from paceline.errors import PacelineError
from paceline.results import Chunk, Completion


class Decoder(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as answers need it."""

    strip_start: int

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What the token adds to the text."""


@dataclass
class _Choice:
    """What is known of one choice. A stream keeps its tokens alone."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    placing: Placing | None = None  # when logprobs are asked for
    placed: list[Placed] = field(default_factory=list)  # tokens whose logprobs were not told yet
    characters: int = 0  # of the text so far
    untold: int = 0  # tokens since the last event
    role_sent: bool = False
    completion: Completion | None = None


class Answer:
    """The answer to one request. Feed every chunk to ``events`` (streaming) or to ``take``, then ask for ``body``."""

    def __init__(self, request: ApiRequest, model: str, tokenizer: Decoder, fingerprint: str = "") -> None:
        """fingerprint: of what the text depends on besides the request."""
        self._request, self._tokenizer = request, tokenizer
        self._choices = [_Choice() for _ in range(request.generation.sampling.n)]
        self._prompt_ids: tuple[int, ...] = ()
        self._prompt_told = not request.return_token_ids
        kind = "chat.completion" if request.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": request.generation.request_id,
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint or None,
        }

    def planned(self, plan: Plan) -> None:
        """Note the prompt, before the first chunk."""
        self._prompt_ids = plan.sequences[0].prompt_token_ids
        if self._request.generation.sampling.top_logprobs is not None:
            for choice in self._choices:
                choice.placing = Placing(self._tokenizer, self._prompt_ids)

    # -- complete ----------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Note a chunk for ``body``."""
        choice = self._choices[chunk.choice]
        choice.text.append(chunk.text)
        self._note(choice, chunk)

    def body(self) -> dict[str, Any]:
        """The complete answer. Raises PacelineError when a choice is not complete."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        body = {**self._head, "choices": choices, "usage": self._usage(), "paceline": self._details()}
        return self._with_prompt(body)

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said: dict[str, Any] = {"text": text}
        if self._request.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(choice.placed, len(text)) if choice.placing else None,
            "finish_reason": _completed(choice).finish_reason.value,
            **({"token_ids": choice.token_ids} if self._request.return_token_ids else {}),
        }

    # -- streaming ---------------------------------------------------------------------------------------------

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What to send for a chunk; nothing while no text, no logprob and no end came with it."""
        choice = self._choices[chunk.choice]
        self._note(choice, chunk)
        events = []
        if self._request.chat and not choice.role_sent:
            choice.role_sent = True
            events.append(self._event([_delta(chunk.choice, {"role": "assistant", "content": ""}, None, None)]))
        ready = self._ready(choice)
        if chunk.text or ready or chunk.completion:
            events.append(self._event([self._part(choice, chunk, ready)]))
        if all(choice.completion for choice in self._choices):
            if self._request.include_usage:
                events.append({**self._event([]), "usage": self._usage()})
            events[-1]["paceline"] = self._details()
        if events and not self._prompt_told:
            self._prompt_told = True
            events[0] = self._with_prompt(events[0])
        return events

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._request.include_usage else {}
        if self._request.continuous_usage:
            usage = {"usage": self._usage_so_far()}
        return {**self._head, "choices": choices, **usage}

    def _ready(self, choice: _Choice) -> list[Placed]:
        """Tokens whose logprobs can be told: of a text, those that no stop string can cut off any more, so that no
        offset is behind the text."""
        known = choice.placed
        if not (self._request.chat or choice.completion):
            known = [token for token in known if token.offset <= choice.characters]  # offsets grow
        choice.placed = choice.placed[len(known) :]
        return known

    def _part(self, choice: _Choice, chunk: Chunk, ready: list[Placed]) -> dict[str, Any]:
        reason = chunk.completion.finish_reason.value if chunk.completion else None
        logprobs = self._logprobs(ready, choice.characters) if ready else None
        if self._request.chat:
            part = _delta(chunk.choice, {"content": chunk.text} if chunk.text else {}, logprobs, reason)
        else:
            part = {"index": chunk.choice, "text": chunk.text, "logprobs": logprobs, "finish_reason": reason}
        if self._request.return_token_ids:
            part["token_ids"] = choice.token_ids[len(choice.token_ids) - choice.untold :]
        choice.untold = 0
        return part

    # -- both --------------------------------------------------------------------------------------------------

    def _note(self, choice: _Choice, chunk: Chunk) -> None:
        choice.token_ids += chunk.token_ids
        choice.untold += len(chunk.token_ids)
        choice.characters += len(chunk.text)
        choice.completion = chunk.completion
        if choice.placing:
            entries = zip(chunk.token_ids, chunk.logprobs, strict=True)
            choice.placed += [choice.placing.place(token_id, entry) for token_id, entry in entries]

    def _logprobs(self, placed: list[Placed], length: int) -> dict[str, Any]:
        if self._request.chat:
            return chat_logprobs(placed, self._request.tokens_as_ids)
        return completions_logprobs(placed, length, self._request.tokens_as_ids)

    def _with_prompt(self, told: dict[str, Any]) -> dict[str, Any]:
        """``told`` with the prompt's token ids where vLLM has them, when they are asked for."""
        prompt = {"prompt_token_ids": list(self._prompt_ids)}
        if not self._request.return_token_ids:
            return told
        if self._request.chat:
            return {**told, **prompt}
        return {**told, "choices": [{**choice, **prompt} for choice in told["choices"]]}

    def _usage_so_far(self) -> dict[str, int]:
        prompt, completion = len(self._prompt_ids), sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _usage(self) -> Usage:
        """The prompt counts once, however many choices there are."""
        usages = [_completed(choice).usage for choice in self._choices]
        prompt, completion = usages[0].prompt_tokens, sum(usage.completion_tokens for usage in usages)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=usages[0].cached_tokens),
        )

    def _details(self) -> dict[str, Any]:
        each = [_details(_completed(choice)) for choice in self._choices]
        more = {"choices": each} if len(each) > 1 else {}
        return {**each[0], "token_ids": [choice.token_ids for choice in self._choices], **more}


def _delta(index: int, delta: dict[str, str], logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _completed(choice: _Choice) -> Completion:
    if choice.completion is None:
        raise PacelineError("the answer ended before its last token")
    return choice.completion


def _details(completion: Completion) -> dict[str, Any]:
    parts = ("speculation", "timing", "nodes", "handoff")
    return {**{part: asdict(getattr(completion, part)) for part in parts}, "seed": completion.seed}
