"""Chat templates: the model's own programs, which make one text of a conversation.

They run in jinja2's sandbox, for a bounded time. A template that knows no tools gets them as text: a system turn tells
of them in the Hermes format, calls stand in the assistant's turns, and what tools return stands in turns of the user.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidRequest

Message = Mapping[str, Any]
MAX_RENDERED_CHARS = 32 * 1024 * 1024  # of one prompt; no context is as long
MAX_RENDER_S = 10.0  # for one prompt
TOOLS_INTRO = """You may call tools. Each line between <tools> and </tools> describes one as JSON:
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as one JSON object, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"KEY": VALUE}}}}
</tool_call>
Several calls may follow each other. What a tool returns comes back between <tool_response> and </tool_response>."""


class ChatTemplate:
    """The templates of a model: one, or several by name, of which ``tool_use`` is for conversations with tools."""

    def __init__(self, source: Any, specials: Mapping[str, str]) -> None:
        """source: text, or a list of objects with name and template. specials: special tokens by name, e.g.
        ``bos_token``. Raises ConfigError for a template that cannot be read."""
        if isinstance(source, str):
            source = [{"name": "default", "template": source}]
        named = source if isinstance(source, list) else []
        self._sources = {str(entry["name"]): str(entry["template"]) for entry in named}
        self._compiled = {name: _compile(text) for name, text in self._sources.items()}
        self._specials = dict(specials)
        used = self._sources.get("tool_use", self._sources.get("default", ""))
        self.source = used  # what conversations with tools are made by
        self.knows_tools = bool(used) and "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(used))

    def __bool__(self) -> bool:
        return "default" in self._compiled

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        native_tools: bool,
        add_generation_prompt: bool,
        values: Mapping[str, Any],
    ) -> str:
        """The text. native_tools: the template gets the tools; else they are told in text. Raises InvalidRequest."""
        told = dict(values) | {"add_generation_prompt": add_generation_prompt, "documents": values.get("documents")}
        if native_tools:
            template = self._compiled["tool_use" if tools and "tool_use" in self._compiled else "default"]
            return self._run(template, told | {"messages": [dict(m) for m in messages], "tools": tools})
        template = self._compiled["default"]
        plain = tools_as_text(messages, tools)
        try:
            return self._run(template, told | {"messages": plain, "tools": None})
        except InvalidRequest:
            if not tools:
                raise
            return self._run(template, told | {"messages": _without_system(plain), "tools": None})

    def _run(self, template: jinja2.Template, values: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = MAX_RENDERED_CHARS
        ends_at = _ENDS_AT.set(time.monotonic() + MAX_RENDER_S)
        try:
            for piece in template.generate(**{**self._specials, **values}):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest("messages", f"make a prompt of more than {MAX_RENDERED_CHARS} characters")
        except InvalidRequest:
            raise
        except Exception as error:  # the template is the model's own program: it may fail in any way
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from None
        finally:
            _ENDS_AT.reset(ends_at)
        return "".join(pieces)


def tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation for a template that knows neither tools nor calls. Results that follow each other share a turn,
    because many templates want users and assistants to alternate."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("of_tools"):
                told[-1]["content"] += "\n" + result
            else:
                told.append({"role": "user", "content": result, "of_tools": True})
            continue
        calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
        content = "\n".join([*([message["content"]] if message["content"] else ()), *calls])
        told.append({key: value for key, value in message.items() if key != "tool_calls"} | {"content": content})
    if tools:
        intro = TOOLS_INTRO.format(tools="\n".join(_to_json(tool) for tool in tools))
        if told and told[0]["role"] == "system":
            told[0]["content"] = f"{told[0]['content']}\n\n{intro}".lstrip()
        else:
            told.insert(0, {"role": "system", "content": intro})
    return [{key: value for key, value in turn.items() if key != "of_tools"} for turn in told]


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{_to_json(call)}\n</tool_call>"


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates that take no system turn: its text begins the turn after it."""
    system, *rest = messages
    if not rest:
        return [{**system, "role": "user"}]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENDS_AT: ContextVar[float] = ContextVar("ends_at", default=math.inf)  # of a rendering, monotonic clock


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's, whose every turn of a loop and every call of a macro looks at the clock."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro)]
        for node in bodies:
            tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return tree

    @staticmethod
    def tick() -> None:
        """Raises TemplateError once the time is over."""
        if time.monotonic() > _ENDS_AT.get():
            raise jinja2.TemplateError(f"it takes more than {MAX_RENDER_S:g} s")


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox, with the functions that Hugging Face templates are written for."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError("model", f"the chat template cannot be read: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes what HTML would misread, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
