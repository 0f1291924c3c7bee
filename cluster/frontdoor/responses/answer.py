"""The answer to one request of the Responses API, from the first event to the last.

Life: queued -> ``begin`` in_progress -> ``take`` for every chunk -> one of ``complete`` (completed, or incomplete at a
limit), ``cancel`` (cancelled), ``fail`` (failed). ``body`` can be asked for at any time, and is what the events, put
together, say.
"""

from __future__ import annotations

import time
from typing import Any

from cluster.contract.generation import ChatMessage
from cluster.frontdoor.http_errors import HttpProblem
from cluster.frontdoor.openai_stream import details
from cluster.frontdoor.responses.output import Kind, OutputItem
from cluster.frontdoor.responses.parse import Asked
from cluster.frontdoor.responses.requests import NamedTool
from cluster.frontdoor.stream_events import Event
from paceline.request import FinishReason
from paceline.results import Chunk, Completion, ToolCall, ToolCallPart

_ORDER: tuple[Kind, ...] = ("reasoning", "message", "function_call")


class Answer:
    """What is known of the answer."""

    def __init__(self, asked: Asked, model: str, created_at: int) -> None:
        """model: the one that is served. created_at: Unix time in seconds."""
        self._asked, self._model = asked, model
        self._created_at = created_at
        self._completed_at: int | None = None
        self._output: list[OutputItem] = []
        self._calls: dict[int, OutputItem] = {}  # by the index that the router gives a call
        self._sequence_number = 0
        self._completion: Completion | None = None
        self._error: dict[str, str] | None = None
        self.status = "queued"

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join(item.text for item in self._output if item.kind == "reasoning")

    @property
    def in_order(self) -> bool:
        """Whether the output is a thought, then a message, then calls, as far as it is made. The items of
        any other depend on how the tokens were cut into chunks."""
        places = [_ORDER.index(item.kind) for item in self._output]
        return places == sorted(places)

    def turn(self) -> ChatMessage:
        """The answer as a turn of the conversation."""
        said = "".join(item.text for item in self._output if item.kind == "message")
        calls = (ToolCall(item.call_id, item.name, item.text) for item in self._output if item.kind == "function_call")
        return ChatMessage("assistant", said, tool_calls=tuple(calls), reasoning=self.reasoning)

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self) -> list[Event]:
        """It is being made."""
        self.status = "in_progress"
        return self._numbered([self._whole("created"), self._whole("in_progress")])

    def number_from(self, number: int) -> None:
        """The next event has this number: the client has those before."""
        self._sequence_number = number

    def take(self, chunk: Chunk) -> list[Event]:
        """More of it."""
        events: list[Event] = []
        for step in chunk.in_order or (chunk,):
            for kind, piece in (("reasoning", step.reasoning), ("message", step.text)):
                if piece:
                    events += self._of(kind)  # type: ignore[arg-type]  # the two words are kinds
                    events += self._output[-1].delta(piece)
            for part in step.tool_calls:
                events += self._call(part)
        return self._numbered(events)

    def complete(self, completion: Completion) -> list[Event]:
        """It is over."""
        self._completion = completion
        self._completed_at = int(time.time())
        events = [] if self._output else self._of("message")  # clients look for a message
        cut = completion.finish_reason is FinishReason.LENGTH
        self.status = "incomplete" if cut else "completed"
        return self._end(events, "incomplete" if cut else "completed")

    def cancel(self) -> list[Event]:
        """It was asked to end."""
        self.status = "cancelled"
        return self._end([], "incomplete")

    def fail(self, problem: HttpProblem) -> list[Event]:
        """It cannot be completed."""
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        self.status, self._error = "failed", {"code": code, "message": problem.message}
        return self._end([], "failed")

    def _end(self, events: list[Event], word: str) -> list[Event]:
        """Close the last item, then tell the whole. word: what the last event is called."""
        events = events + self._close("completed" if word == "completed" else "incomplete")
        return self._numbered([*events, self._whole(word)])

    def _of(self, kind: Kind) -> list[Event]:
        """Go on with an item of this kind: with the last one, or one that is begun now."""
        if self._output and self._output[-1].kind == kind:
            return []
        return self._open(self._item(kind))

    def _call(self, part: ToolCallPart) -> list[Event]:
        events: list[Event] = []
        if part.index not in self._calls:
            item = self._item("function_call", part.id, part.name)
            events += self._open(item)
            self._calls[part.index] = item
        return events + (self._calls[part.index].delta(part.arguments) if part.arguments else [])

    def _item(self, kind: Kind, call_id: str = "", name: str = "") -> OutputItem:
        return OutputItem(kind, len(self._output), self._asked.generation.request_id, call_id, name)

    def _open(self, item: OutputItem) -> list[Event]:
        closed = self._close("completed")
        self._output.append(item)
        return closed + item.added()

    def _close(self, status: Any) -> list[Event]:
        last = self._output[-1] if self._output else None
        return [] if last is None or last.status != "in_progress" else last.done(status)

    def _whole(self, word: str) -> Event:
        return {"type": f"response.{word}", "response": self.body()}

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._sequence_number
            self._sequence_number += 1
        return events

    # -- the whole -----------------------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """The answer as far as it is made."""
        over = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return {
            "id": self._asked.generation.request_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": self._completed_at,
            "status": self.status,
            "error": self._error,
            "incomplete_details": over,
            "model": self._model,
            "output": [item.shown() for item in self._output],
            "usage": self._usage(),
            "paceline": None if self._completion is None else details(self._completion),
            **_echo(self._asked),
        }

    def _usage(self) -> dict[str, Any] | None:
        if self._completion is None:
            return None
        usage = self._completion.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _echo(asked: Asked) -> dict[str, Any]:
    """What the request said, with the defaults filled in."""
    body = asked.body
    said = body.model_dump(
        include={"instructions", "max_output_tokens", "previous_response_id", "text", "tools"},
        exclude={"text": {"verbosity"}},
        by_alias=True,
    )
    form = {"type": "text"} if body.text is None or body.text.format is None else said["text"]["format"]
    tools, choice, sampling = said["tools"] or [], body.tool_choice, asked.generation.sampling
    return {
        **said,
        "background": bool(body.background),
        "metadata": dict(body.metadata or {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "store": asked.stored,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "temperature": sampling.temperature,
        "text": {"format": _given(form)},
        "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
        "tools": [_given(tool) for tool in tools],
        "top_p": sampling.top_p,
        "truncation": "disabled",
    }


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
