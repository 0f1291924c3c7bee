"""What every body of the other APIs may say beyond its API: the fields of ours, under the names of `openai_requests`.

They come to the router the same way, whichever API a client speaks.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from cluster.access.caller import with_salt
from cluster.contract.generation import (
    MAX_PRIORITY,
    Chat,
    ChatMessage,
    GenerationRequest,
    Tool,
    ToolChoice,
    check_unicode,
)
from cluster.contract.tools import check_values
from cluster.frontdoor.json_models import JsonObject, Text, at_most
from cluster.frontdoor.openai_parse import speculation_of
from cluster.frontdoor.openai_requests import CacheSalt, Speculation
from paceline.errors import InvalidRequest
from paceline.request import UINT64_MAX, SamplingParams
from paceline.results import ToolCall

MAX_TOOL_NAME = 128  # characters
MAX_CALL_ID = 256  # characters

ToolName = Annotated[Text, Field(min_length=1, max_length=MAX_TOOL_NAME)]
CallId = Annotated[Text, Field(min_length=1, max_length=MAX_CALL_ID)]


def text_or_list(value: Any) -> str | None:
    """Which branch of a union of a text and a list reads ``value``."""
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else None


def list_of(most: int) -> tuple[Any, ...]:
    """Bounds of a list, which is not read beyond its first wrong item."""
    return (Field(max_length=most, fail_fast=True), at_most(most))


class OwnFields(JsonObject):
    """The part of a body that is ours."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made. The default is false."""
    seed: Annotated[int, Field(ge=0, le=UINT64_MAX)] | None = None
    """The same request and seed give the same answer. Without it one is drawn, and told in `paceline`."""
    speculation: Speculation | None = None
    """How tokens are drafted for this request."""
    cache_salt: CacheSalt | None = None
    """The tenant: scope of the prefix cache, of the router's fairness and of stored answers. With API keys it divides
    the prefix cache of the key's tenant."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """While requests of a tenant wait, the one of the higher priority goes first. The default is 0."""


@dataclass(frozen=True)
class Names:
    """What the library's fields are called in a body. A field of another name keeps it."""

    of: Mapping[str, str]

    def renamed(self, error: Exception) -> Exception:
        """``error`` with the field named as the body names it; a path into a chat ends where the body's begins."""
        if not isinstance(error, InvalidRequest):
            return error
        for name, here in self.of.items():
            if error.field == name or error.field.startswith((f"{name}[", f"{name}.")):
                return InvalidRequest(here, error.message, error.code)
        return error


def generation(
    own: OwnFields, chat: Chat, sampling: SamplingParams, max_tokens: int | None, request_id: str
) -> GenerationRequest:
    """What the router is asked."""
    tenant, salt = with_salt(own.cache_salt or "")
    return GenerationRequest(
        prompt=chat,
        sampling=sampling,
        max_tokens=max_tokens,
        speculation=speculation_of(own.speculation or Speculation()),
        model=own.model or "",
        request_id=request_id,
        tenant=tenant,
        cache_salt=salt,
        priority=own.priority or 0,
    )


def check_tools(tools: tuple[Tool, ...], choice: ToolChoice, name: str) -> None:
    """Raise InvalidRequest when a call is asked for that no tool can take."""
    names = {tool.name for tool in tools}
    if choice is ToolChoice.REQUIRED and not tools:
        raise InvalidRequest("tool_choice", "asks for a call, and there are no tools")
    if choice is ToolChoice.NAMED and name not in names:
        raise InvalidRequest("tool_choice.name", "is none of the tools")


def json_text(where: str, value: Mapping[str, Any] | None) -> str:
    """An object as text, as the router takes schemas and arguments; empty for none. Raises InvalidRequest for what is
    no Unicode, or too much."""
    if value is None:
        return ""
    check_values(where, value)
    text = json.dumps(value, ensure_ascii=False)
    check_unicode(where, text)
    return text


def new_id(prefix: str) -> str:
    """An id that nobody guesses: 122 random bits."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Calls:
    """The calls that a conversation has made so far; turns of tools must answer one of them."""

    def __init__(self, before: Iterable[ChatMessage] = ()) -> None:
        """before: turns that are already there."""
        self._names = {call.id: call.name for turn in before for call in turn.tool_calls}

    def made(self, call_id: str, name: str) -> None:
        """The model called the tool ``name``."""
        self._names[call_id] = name

    def answered(self, where: str, call_id: str, text: str) -> ChatMessage:
        """The turn of the tool. Raises InvalidRequest at ``where`` when there was no such call."""
        if call_id not in self._names:
            raise InvalidRequest(where, "is not the id of a call before it")
        return ChatMessage("tool", text, tool_call_id=call_id, name=self._names[call_id])


@dataclass
class OpenTurn:
    """A turn to which more comes. Its pieces are put together once: a turn may have thousands of them."""

    role: str
    texts: list[str] = field(default_factory=list)  # none of them is empty
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def say(self, text: str) -> None:
        """One more piece of its text."""
        if text:
            self.texts.append(text)

    def closed(self) -> ChatMessage:
        """The turn as a template gets it."""
        return ChatMessage(self.role, "".join(self.texts), tuple(self.calls), reasoning="".join(self.thoughts))
