"""The answer to one request of the Messages API, from the first event to the last.

Life: ``begin`` -> ``take`` for every chunk -> ``complete``. ``body`` is what the events, put together, say. A block is
closed before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from cluster.frontdoor.messages.requests import MessageRequest
from cluster.frontdoor.openai_stream import details
from cluster.frontdoor.stream_events import Event
from paceline.request import FinishReason
from paceline.results import Chunk, Completion, ToolCallPart, Usage

Kind = Literal["thinking", "text", "tool_use"]
# By kind: what its deltas are called, and the field that has the piece.
_DELTAS: dict[Kind, tuple[str, str]] = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass
class _Block:
    """One block. call: of a tool_use, the index that the router gives it, its id and the tool."""

    kind: Kind
    call: tuple[int, str, str] | None = None
    pieces: list[str] = field(default_factory=list)

    def shown(self) -> dict[str, Any]:
        """The block as far as it is made."""
        text = "".join(self.pieces)
        if self.call is not None:
            _, call_id, name = self.call
            return {"type": "tool_use", "id": call_id, "name": name, "input": _arguments(text)}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}


class Answer:
    """What is known of the answer."""

    def __init__(self, asked: MessageRequest, request_id: str, model: str) -> None:
        """model: the one that is served."""
        self._asked = asked
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[_Block] = []
        self._completion: Completion | None = None

    # -- events ------------------------------------------------------------------------------------------------

    def begin(self, prompt_tokens: int) -> list[Event]:
        """It is being made. What of the prompt is cached is known at the end only."""
        usage = _usage(Usage(prompt_tokens))
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": usage}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def take(self, chunk: Chunk) -> list[Event]:
        """More of it."""
        events: list[Event] = []
        for step in chunk.in_order or (chunk,):
            events += self._more("thinking", step.reasoning) + self._more("text", step.text)
            for part in step.tool_calls:
                events += self._call(part)
        return events

    def complete(self, completion: Completion) -> list[Event]:
        """It is over."""
        self._completion = completion
        delta = {"stop_reason": self._stop_reason(completion), "stop_sequence": completion.stop_string or None}
        end = {"type": "message_delta", "delta": delta, "usage": _usage(completion.usage)}
        return [*self._close(), {**end, "paceline": details(completion)}, {"type": "message_stop"}]

    def _more(self, kind: Kind, piece: str) -> list[Event]:
        if not piece:
            return []
        begun = [] if self._blocks and self._blocks[-1].kind == kind else self._open(_Block(kind))
        return begun + self._delta(piece)

    def _call(self, part: ToolCallPart) -> list[Event]:
        last = self._blocks[-1] if self._blocks else None
        events: list[Event] = []
        if last is None or last.call is None or last.call[0] != part.index:
            events = self._open(_Block("tool_use", (part.index, part.id, part.name)))
        return events + (self._delta(part.arguments) if part.arguments else [])

    def _open(self, block: _Block) -> list[Event]:
        closed = self._close()
        self._blocks.append(block)
        begun = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block.shown()}
        return [*closed, begun]

    def _delta(self, piece: str) -> list[Event]:
        block = self._blocks[-1]
        block.pieces.append(piece)
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: piece}
        return [{"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}]

    def _close(self) -> list[Event]:
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}] if self._blocks else []

    # -- the whole -----------------------------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """The complete answer."""
        assert self._completion is not None
        return {
            **self._head,
            "content": [block.shown() for block in self._blocks],
            "stop_reason": self._stop_reason(self._completion),
            "stop_sequence": self._completion.stop_string or None,
            "usage": _usage(self._completion.usage),
            "paceline": details(self._completion),
        }

    def _stop_reason(self, completion: Completion) -> str:
        if completion.finish_reason is FinishReason.TOOL_CALLS:
            return "tool_use"
        if completion.finish_reason is FinishReason.LENGTH:
            full = completion.usage.completion_tokens < self._asked.max_tokens
            return "model_context_window_exceeded" if full else "max_tokens"
        return "stop_sequence" if completion.stop_string else "end_turn"


def _usage(usage: Usage) -> dict[str, int]:
    """The prompt's tokens count once: as read from a cache, or as input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }


def _arguments(text: str) -> dict[str, Any]:
    """The object that the arguments are; of one that was cut, what is whole. Clients read streamed pieces alike."""
    try:
        value = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
