"""Turns what the router yields into bodies and stream events of OpenAI's API.

The last thing a client gets, a body or the last event, carries what OpenAI's shape has no place for: ``paceline``, with
speculation, timing, nodes, handoff and seed of the first choice, the token ids of every choice, and with ``n > 1``
the details of each choice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from cluster.contract.plan import Plan
from cluster.frontdoor import openai_tools
from cluster.frontdoor.openai_answers import CompletionDetails, PromptDetails, Usage
from cluster.frontdoor.openai_logprobs import Placed, Placing, chat_logprobs, completions_logprobs
from cluster.frontdoor.openai_parse import ApiRequest
from cluster.frontdoor.openai_prompts import echoed_logprobs, joined, prompt_logprobs, text_offsets
from cluster.frontdoor.prompts import AskedPrompt
from cluster.frontdoor.resuming import Position, Told
from paceline.errors import PacelineError
from paceline.request import FinishReason, TokenLogprobs
from paceline.results import Chunk, Completion, ToolCallPart
from paceline.results import joined as whole_calls
from paceline.text.markers import showing_specials


class Decoder(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as answers need it."""

    strip_start: int

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What the token adds to the text."""


@dataclass
class _Choice:
    """What is known of one choice. A stream keeps its tokens alone."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallPart] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    placing: Placing | None = None  # when logprobs are asked for
    placed: list[Placed] = field(default_factory=list)  # tokens whose logprobs were not told yet
    characters: int = 0  # of the text so far, the prompt's counted where it is repeated
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_logprobs: int = 0  # that were streamed
    echoed: bool = False  # the prompt's text was streamed
    told: int = 0  # tokens up to the last event
    role_sent: bool = False
    completion: Completion | None = None


class Answer:
    """The answer to one request. Feed every chunk to ``events`` (streaming) or to ``take``, then ask for ``body``."""

    # It has over 20 methods, since each field of an answer has one, and all of them read the same choices.

    def __init__(
        self,
        request: ApiRequest,
        model: str,
        tokenizer: Decoder,
        prompts: Sequence[AskedPrompt] = (),
        fingerprint: str = "",
        resumable: bool = False,
    ) -> None:
        """prompts: those of the request, where the answer tells of them. fingerprint: of what the text depends on
        besides the request. resumable: events of a stream have ids."""
        self._request, self._prompts, self._tokenizer = request, prompts, tokenizer
        self._n = request.generation.sampling.n
        self._choices = [_Choice() for _ in range(self._n * len(request.generations))]
        self._prompt_ids: dict[int, tuple[int, ...]] = {}  # by the prompt's number
        self._prompts_told: set[int] = set()
        self._offsets: dict[int, list[int]] = {}  # of each prompt's tokens in its text
        self._resumable, self._position = resumable, None  # type: bool, Position | None
        resume = request.generation.resume
        had = [Told()] * len(self._choices)  # by the client that resumes
        self._had = had if resume is None else [Told(one.next_index, one.complete) for one in resume.choices]
        self._name_of = lru_cache(maxsize=4096)(self._name)
        kind = "chat.completion" if request.chat else "text_completion"
        self._head: dict[str, Any] = {
            "id": request.generation.request_id,
            "object": f"{kind}.chunk" if request.chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint or None,
        }

    def planned(self, number: int, plan: Plan) -> None:
        """Note prompt ``number``, before its first chunk."""
        self._position = Position.of(plan) if self._resumable else None
        self._prompt_ids[number] = plan.sequences[0].prompt_token_ids
        start = len(self._echo(number))
        for choice in self._choices[number * self._n : (number + 1) * self._n]:
            choice.characters = start
            if self._request.generation.sampling.top_logprobs is not None:
                skips = self._request.generation.sampling.skip_special_tokens
                tokenizer = self._tokenizer if skips else showing_specials(self._tokenizer)
                choice.placing = Placing(tokenizer, self._prompt_ids[number], start)

    # -- complete ----------------------------------------------------------------------------------------------

    def take(self, chunk: Chunk) -> None:
        """Note a chunk for ``body``."""
        choice = self._choices[chunk.choice]
        choice.text.append(chunk.text)
        choice.reasoning.append(chunk.reasoning)
        choice.calls += chunk.tool_calls
        self._note(choice, chunk)

    def body(self) -> dict[str, Any]:
        """The complete answer. Raises PacelineError when a choice is not complete."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        told = {"prompt_logprobs": self._prompt_logprobs(0, self._choices[0])} if self._request.chat else {}
        body = {**self._head, "choices": choices, **told, "usage": self._usage(), "paceline": self._details()}
        return self._with_prompts(body, or_null=True)

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        said: dict[str, Any] = {"text": self._echo(index // self._n) + text}
        logprobs = self._logprobs(choice.placed, choice.characters) if choice.placing else None
        if self._request.echo and logprobs is not None:
            logprobs = joined(self._echoed_logprobs(index, 1, choice.prompt_logprobs), logprobs)
        said["prompt_logprobs"] = self._prompt_logprobs(index, choice)
        if self._request.chat:
            said = {"message": openai_tools.message(text, "".join(choice.reasoning), whole_calls(choice.calls))}
        return {
            "index": index,
            **said,
            "logprobs": logprobs,
            **self._ended(choice, _completed(choice)),
            "token_ids": choice.token_ids if self._request.return_token_ids else None,
        }

    # -- streaming ---------------------------------------------------------------------------------------------

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """What to send for a chunk; nothing while no text, no logprob and no end came with it."""
        choice = self._choices[chunk.choice]
        events = []
        if self._request.chat and not choice.role_sent:  # its usage has no token of this chunk
            choice.role_sent = True
            begins = {"role": "assistant", "content": ""}
            events.append(self._event([_delta(chunk.choice, begins, None, {"finish_reason": None})]))
        self._note(choice, chunk)
        if self._request.echo:
            events += self._echo_events(choice, chunk)
        ready = self._ready(choice)
        if chunk.text or chunk.reasoning or chunk.tool_calls or ready or chunk.completion:
            for step in chunk.in_order or (chunk,):  # clients read one part of a call in an event
                events.append(self._event([self._part(choice, step, ready)]))
                ready = []
        if all(choice.completion for choice in self._choices):
            if self._request.include_usage:
                events.append({**self._event([]), "usage": self._usage()})
            events[-1]["paceline"] = self._details()
        number = chunk.choice // self._n
        if events and number not in self._prompts_told:
            self._prompts_told.add(number)
            events[0] = self._with_prompts(events[0])
        return events

    def new_events(self, chunk: Chunk) -> list[tuple[str, dict[str, Any]]]:
        """``events`` of a chunk, without those that a client which resumes has. Each comes with its id, which is empty
        where the stream cannot be resumed from."""
        events = self.events(chunk)
        if chunk.retold:
            choice = self._choices[chunk.choice]
            choice.told = len(choice.token_ids)  # also where no event came of it
        if not events:
            return []
        ids = [""] * len(events)
        over = all(choice.completion for choice in self._choices)
        usage_is_apart = over and self._request.include_usage
        if self._position is not None:
            told = [
                Told(max(had.num_tokens, choice.told), had.complete or choice.completion is not None)
                for had, choice in zip(self._had, self._choices, strict=True)
            ]
            ids[-1] = str(self._position.at(told, over))
            if usage_is_apart:
                ids[-2] = str(self._position.at(told, over=False))
        if not chunk.retold:
            return list(zip(ids, events, strict=True))
        if not over:
            return []
        last = events[-1] if usage_is_apart else {**self._event([]), "paceline": events[-1]["paceline"]}
        return [(ids[-1], last)]

    def _echo_events(self, choice: _Choice, chunk: Chunk) -> list[dict[str, Any]]:
        """The prompt: its text at once, with the first of its log-probabilities where those are told."""
        text = "" if choice.echoed else self._echo(chunk.choice // self._n)
        logprobs = None
        if choice.placing and (chunk.prompt_logprobs or not choice.echoed):
            first = choice.num_prompt_logprobs + 1
            logprobs = self._echoed_logprobs(chunk.choice, first, chunk.prompt_logprobs)
            choice.num_prompt_logprobs += len(chunk.prompt_logprobs)
        if choice.echoed and logprobs is None:
            return []
        choice.echoed = True
        return [self._event([{"index": chunk.choice, "text": text, "logprobs": logprobs, "finish_reason": None}])]

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
        ended = self._ended(choice, chunk.completion) if chunk.completion else {"finish_reason": None}
        logprobs = self._logprobs(ready, choice.characters) if ready else None
        if self._request.chat:
            part = _delta(chunk.choice, openai_tools.delta(chunk), logprobs, ended)
        else:
            part = {"index": chunk.choice, "text": chunk.text, "logprobs": logprobs, **ended}
        if self._request.return_token_ids:
            part["token_ids"] = choice.token_ids[choice.told :]
        choice.told = len(choice.token_ids)
        return part

    def _ended(self, choice: _Choice, completion: Completion) -> dict[str, Any]:
        """Why it ended, and by which stop text or token: as vLLM says it, of the request's own, and as SGLang does."""
        own = self._request.generation.sampling.stop_token_ids
        reason = completion.finish_reason
        last = choice.token_ids[-1] if choice.token_ids and reason is FinishReason.STOP else None
        return {
            "finish_reason": reason.value,
            "stop_reason": completion.stop_string or (last if last in own else None),
            "matched_stop": completion.stop_string or last,
        }

    # -- the prompts -------------------------------------------------------------------------------------------

    def _echo(self, number: int) -> str:
        return self._prompts[number].text if self._request.echo else ""

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._request.tokens_as_ids else self._tokenizer.decode((token_id,))

    def _echoed_logprobs(self, index: int, first: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        number = index // self._n
        token_ids = self._prompts[number].token_ids
        if number not in self._offsets:
            self._offsets[number] = text_offsets(token_ids, self._tokenizer)
        top = self._request.generation.sampling.top_logprobs or 0
        return echoed_logprobs(token_ids, first, entries, top, self._name_of, self._offsets[number])

    def _prompt_logprobs(self, index: int, choice: _Choice) -> list[dict[str, dict[str, Any]] | None] | None:
        if self._request.prompt_logprobs is None:
            return None
        token_ids = self._prompts[index // self._n].token_ids
        return prompt_logprobs(token_ids, choice.prompt_logprobs, self._request.prompt_logprobs, self._name_of)

    def _with_prompts(self, told: dict[str, Any], or_null: bool = False) -> dict[str, Any]:
        """``told`` with the prompts' token ids where vLLM has them, when they are asked for; else as it is, or with
        null there."""
        asked = self._request.return_token_ids
        if not (asked or or_null):
            return told
        ids = {number: list(ids) if asked else None for number, ids in self._prompt_ids.items()}
        if self._request.chat:
            return {**told, "prompt_token_ids": ids[0]}
        choices = [{**choice, "prompt_token_ids": ids[choice["index"] // self._n]} for choice in told["choices"]]
        return {**told, "choices": choices}

    # -- both --------------------------------------------------------------------------------------------------

    def _note(self, choice: _Choice, chunk: Chunk) -> None:
        choice.token_ids += chunk.token_ids
        choice.characters += len(chunk.text)
        choice.prompt_logprobs += chunk.prompt_logprobs
        choice.completion = chunk.completion
        if choice.placing:
            entries = zip(chunk.token_ids, chunk.logprobs, strict=True)
            choice.placed += [choice.placing.place(token_id, entry) for token_id, entry in entries]

    def _logprobs(self, placed: list[Placed], length: int) -> dict[str, Any]:
        if self._request.chat:
            return chat_logprobs(placed, self._request.tokens_as_ids)
        return completions_logprobs(placed, length, self._request.tokens_as_ids)

    def _usage_so_far(self) -> dict[str, int]:
        prompt = sum(map(len, self._prompt_ids.values()))
        completion = sum(len(choice.token_ids) for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _usage(self) -> Usage:
        """Each prompt counts once, however many choices there are."""
        ends = [_completed(choice) for choice in self._choices]
        usages = [end.usage for end in ends]
        predicted = sum(end.speculation.predicted_tokens for end in ends)
        accepted = sum(end.speculation.accepted_predicted_tokens for end in ends)
        completion, firsts = sum(usage.completion_tokens for usage in usages), usages[:: self._n]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(usage.cached_tokens for usage in firsts)),
            completion_tokens_details=CompletionDetails(
                reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
                accepted_prediction_tokens=accepted,
                rejected_prediction_tokens=predicted - accepted,
            ),
        )

    def _details(self) -> dict[str, Any]:
        each = [details(_completed(choice)) for choice in self._choices]
        more = {"choices": each} if len(each) > 1 else {}
        return {**each[0], "token_ids": [choice.token_ids for choice in self._choices], **more}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, ended: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, **ended}


def _completed(choice: _Choice) -> Completion:
    if choice.completion is None:
        raise PacelineError("the answer ended before its last token")
    return choice.completion


def details(completion: Completion) -> dict[str, Any]:
    """What no API has a place for: how a choice was made."""
    parts = ("speculation", "timing", "nodes", "handoff")
    return {**{part: asdict(getattr(completion, part)) for part in parts}, "seed": completion.seed}
