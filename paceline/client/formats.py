"""What an answer must be: the options of the SDK that become a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from paceline.client.chats import json_of
from paceline.request import Grammar, GrammarKind
from paceline.results import JsonModel

ResponseFormat = type[JsonModel] | Mapping[str, Any] | Literal["json_object"]  # a pydantic model, a JSON Schema, or any
FORMAT_OPTIONS = ("response_format", "regex", "choice", "grammar")


def grammar_of(options: Mapping[str, Any]) -> Grammar | None:
    """The grammar that one of FORMAT_OPTIONS asks for; None without one. TypeError for two, or for another shape."""
    given = [name for name in FORMAT_OPTIONS if name in options]
    if len(given) > 1:
        raise TypeError(f"one of {', '.join(FORMAT_OPTIONS)} at a time, got {' and '.join(given)}")
    if not given:
        return None
    name, value = given[0], options[given[0]]
    if name == "response_format":
        return _response_format(value)
    if name == "choice":
        return Grammar(GrammarKind.CHOICE, json.dumps(_texts(value), ensure_ascii=False))
    if not isinstance(value, str):
        raise TypeError(f"{name} is a text, got {type(value).__name__}")
    return Grammar(GrammarKind.REGEX if name == "regex" else GrammarKind.EBNF, value)


def _response_format(value: Any) -> Grammar:
    if value == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT)
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if not isinstance(value, Mapping):
        raise TypeError(f'response_format is a pydantic model, a JSON Schema or "json_object", got {value!r:.200}')
    return Grammar(GrammarKind.JSON_SCHEMA, json_of("response_format", value))


def _texts(value: Sequence[str]) -> list[str]:
    if isinstance(value, str) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"choice is a list of texts, got {value!r:.200}")
    return list(value)
