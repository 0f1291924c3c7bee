"""Chat templates: Jinja2 text that turns messages into a prompt, run in a sandbox as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidRequest

TEMPLATE_FILE = "chat_template.jinja"
DEFAULT_NAME = "default"


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The statements between the tags, as they are."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. ``special_tokens``: ``bos_token``, ``eos_token`` and so on, as the template names them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ConfigError when ``source`` is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                "model", f"the chat template is broken at line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool) -> str:
        """The prompt. Raises InvalidRequest naming the message that is malformed or what the template refused."""
        checked = check_messages(messages)
        try:
            return self._template.render(
                messages=checked,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refused them: {error.message}") from error
        except Exception as error:  # a template is a program; whatever it trips over came from these messages
            raise InvalidRequest("messages", f"the chat template failed on them: {error}") from error


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Plain copies of ``messages``. Raises InvalidRequest unless each has a role and a content that are text."""
    if not messages:
        raise InvalidRequest("messages", "at least one message is needed")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}]", "must be an object with role and content")
        for key in ("role", "content"):
            check_text(f"messages[{i}].{key}", message.get(key))
    return [dict(message) for message in messages]


def check_text(field: str, value: object) -> None:
    """Raise InvalidRequest naming ``field`` unless ``value`` is a string that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"holds half a surrogate pair at character {error.start}") from None


def find_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The template of a model folder: its own file, else ``chat_template`` of tokenizer_config.json, else None."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if found is None or isinstance(found, str):
        return found
    try:
        named = {entry["name"]: str(entry["template"]) for entry in found}
    except (TypeError, KeyError):
        raise ConfigError("model", "chat_template is neither text nor a list of named templates") from None
    if DEFAULT_NAME not in named:
        raise ConfigError("model", f"no chat template is called {DEFAULT_NAME!r}; there are {', '.join(named)}")
    return named[DEFAULT_NAME]


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
