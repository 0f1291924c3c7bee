"""What a client asks, as plain data: every surface makes it of its own messages, and the router plans from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.errors import InvalidRequest
from paceline.parsing.answer import AnswerFormat
from paceline.request import SamplingParams, SpeculationParams, TokenLogprobs
from paceline.results import ToolCall

MAX_PRIORITY = 10  # the lowest priority is its negative
MAX_NAME_CHARS = 256  # a request id or a tenant is no longer
MAX_STOP_TOKEN_IDS = 1024
MAX_TOOLS = 128  # that a request offers, and calls of a message
MAX_TEXT_ARGUMENTS = 1024  # of a tool
MAX_MESSAGES = 2048  # messages of a chat, and text parts of a message: each costs some time of the event loop
CONTROLS = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
CONTROL = re.compile(f"[{CONTROLS}]")
GENERATION_ID = re.compile(r"[A-Za-z0-9_-]{22,128}")  # room for 128 random bits: the id is a capability


@dataclass(frozen=True)
class ChatMessage:
    """One turn."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's turn
    tool_call_id: str = ""  # of a tool's turn: the call that it answers
    name: str = ""  # who speaks; of a tool's turn the tool
    reasoning: str = ""  # of an assistant's turn: what it thought before it spoke


@dataclass(frozen=True)
class Tool:
    """What the model may call."""

    name: str
    description: str = ""
    parameters: str = ""  # a JSON Schema, as JSON; empty: no arguments
    strict: bool = False  # arguments that do not fit the schema are impossible, also where the model is free to call


class ToolChoice(StrEnum):
    """Whether the model calls tools."""

    AUTO = "auto"  # as it likes
    NONE = "none"
    REQUIRED = "required"  # one or more
    NAMED = "named"  # the tool of ``Chat.tool_name``


@dataclass(frozen=True)
class Chat:
    """A conversation; the model's template makes it a prompt."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    one_tool_call: bool = False  # at most one call in an answer
    continue_final_message: bool = False  # the last turn is the beginning of the answer
    template_values: str = ""  # more values for the template, a JSON object as text; empty: none
    no_generation_prompt: bool = False  # the prompt does not begin the assistant's turn
    reasoning_effort: str = ""  # how much the model is to think, as its template says it; empty: as usual


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True)
class ReceivedChoice:
    """What a client has of a choice: tokens before ``next_index``. The first of them are given here, as many as are
    known; the rest are to be made again."""

    choice: int
    next_index: int
    token_ids: tuple[int, ...] = ()
    complete: bool = False
    num_prompt_logprobs: int = 0  # entries that it has; all of them come before the first token
    logprobs: tuple[TokenLogprobs, ...] = ()  # of ``token_ids``, where a router kept them


@dataclass(frozen=True)
class Resume:
    """What a client has of a stream that broke. ``plan_digest`` is empty when it has not even that. ``retell``: chunks
    of what the client has come too, marked, for a surface that needs them to go on with its shape."""

    plan_digest: bytes = b""
    choices: tuple[ReceivedChoice, ...] = ()
    retell: bool = False


@dataclass(frozen=True)
class GenerationRequest:
    """What a client asks.

    ``max_tokens`` stands for ``sampling.max_tokens``, which is not looked at; None is what the context leaves, at most
    DEFAULT_MAX_TOKENS. An empty ``model`` is the one served, an empty ``request_id`` is made. ``generation_id`` names a
    stream that other routers may go on with, which ``resume`` asks for. ``priority``: the higher one of a tenant's
    waiting requests goes first. ``answer_format``: how the answer to token ids is read; of a chat the router makes it.
    ``cache_salt``: scope of the prefix cache; empty is the tenant. ``truncate_prompt_tokens``: tokens to keep of a
    longer prompt, -1 for as many as fit; ``truncation_side`` left keeps the last ones. ``keeps_told``: its client
    cannot send back the tokens that it was told, so routers keep them.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    model: str = ""
    request_id: str = ""
    tenant: str = ""
    generation_id: str = ""
    resume: Resume | None = None
    priority: int = 0
    answer_format: AnswerFormat | None = None
    cache_salt: str = ""
    truncate_prompt_tokens: int | None = None
    truncation_side: str = ""
    keeps_told: bool = False


def check_count(where: str, count: int, most: int) -> None:
    """Raise InvalidRequest when a list has more items than are looked at."""
    if count > most:
        raise InvalidRequest(where, f"at most {most} items, got {count}")


def check_name(where: str, name: str) -> None:
    """Raise InvalidRequest unless ``name`` is one that a request, or a tenant, may have."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(where, f"at most {MAX_NAME_CHARS} characters")
    check_unicode(where, name)
    if CONTROL.search(name):  # it would forge lines of logs
        raise InvalidRequest(where, "must not have control characters or line ends")


def check_generation_id(generation_id: str) -> None:
    """Raise InvalidRequest unless it is empty or one that nobody guesses."""
    if generation_id and not GENERATION_ID.fullmatch(generation_id):
        raise InvalidRequest("generation_id", "must be 22 to 128 letters, digits, '-' and '_', of 128 random bits")


def check_unicode(where: str, text: str) -> None:
    """Raise InvalidRequest for half a surrogate pair, which JSON can spell and no text has."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(where, "is not valid Unicode: a lone surrogate") from None
