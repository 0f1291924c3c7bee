"""One item of an answer's output while it grows, and the events that tell of it.

Life: ``added`` -> ``delta``, as often as there is text -> ``done``. Clients that put the deltas together have what
``shown`` says at the end.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from cluster.frontdoor.stream_events import Event

Kind = Literal["reasoning", "message", "function_call"]
# By kind: what its id begins with, what its text events are called, the type of its part ("" for none).
_WORDS: dict[Kind, tuple[str, str, str]] = {
    "reasoning": ("rs", "reasoning_text", "reasoning_text"),
    "message": ("msg", "output_text", "output_text"),
    "function_call": ("fc", "function_call_arguments", ""),
}


@dataclass
class OutputItem:
    """One item."""

    kind: Kind
    index: int  # its place in the output
    answer_id: str  # of the answer: every router gives its items the same ids
    call_id: str = ""  # of a call
    name: str = ""  # of a call: the tool
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    pieces: list[str] = field(default_factory=list)  # of its text, or of its arguments

    def __post_init__(self) -> None:
        drawn = hashlib.sha256(f"{self.answer_id}/{self.index}".encode()).hexdigest()[:32]
        self._id = f"{_WORDS[self.kind][0]}_{drawn}"

    @property
    def text(self) -> str:
        """Its text, or its arguments, as far as they are made."""
        return "".join(self.pieces)

    def shown(self) -> dict[str, Any]:
        """The item as far as it is made."""
        about = {"type": self.kind, "id": self._id, "status": self.status}
        match self.kind:
            case "function_call":
                return {**about, "call_id": self.call_id, "name": self.name, "arguments": self.text}
            case "message":
                return {**about, "role": "assistant", "content": self._parts()}
            case _:
                return {**about, "summary": [], "content": self._parts()}

    def added(self) -> list[Event]:
        """The first events. Nothing is in the item yet."""
        begun = [self._event("output_item.added", item=self.shown())]
        return begun + ([self._of_part("content_part.added", part=self._part(""))] if self._part_type else [])

    def delta(self, piece: str) -> list[Event]:
        """More text."""
        self.pieces.append(piece)
        return [self._of_part(f"{self._text_word}.delta", delta=piece, **self._logprobs)]

    def done(self, status: Literal["completed", "incomplete"]) -> list[Event]:
        """The last events."""
        self.status, text = status, self.text
        if not self._part_type:
            ends = [self._of_part(f"{self._text_word}.done", name=self.name, arguments=text)]
        else:
            ends = [
                self._of_part(f"{self._text_word}.done", text=text, **self._logprobs),
                self._of_part("content_part.done", part=self._part(text)),
            ]
        return [*ends, self._event("output_item.done", item=self.shown())]

    @property
    def _text_word(self) -> str:
        return _WORDS[self.kind][1]

    @property
    def _part_type(self) -> str:
        return _WORDS[self.kind][2]

    @property
    def _logprobs(self) -> dict[str, Any]:
        """What events of a message's text have, and no others."""
        return {"logprobs": []} if self.kind == "message" else {}

    def _parts(self) -> list[dict[str, Any]]:
        """The one part; none before the first text, and of a whole item always one."""
        return [self._part(self.text)] if self.pieces or self.status != "in_progress" else []

    def _part(self, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self._part_type, "text": text, **more}

    def _of_part(self, event: str, /, **more: Any) -> Event:
        """An event of the item's text. A call's arguments are no part of a content."""
        place = {"content_index": 0} if self._part_type else {}
        return self._event(event, item_id=self._id, **place, **more)

    def _event(self, event: str, /, **more: Any) -> Event:
        return {"type": f"response.{event}", "output_index": self.index, **more}
