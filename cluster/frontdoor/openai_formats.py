"""Fields that say what the text must be: OpenAI's ``response_format``, vLLM's and SGLang's own. All are a grammar.

At most one of them may say so. What a schema, an expression or a grammar may hold is for the engine to say; its errors
are told under the client's name of the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from cluster.contract.tools import check_values
from cluster.frontdoor.json_models import BRANCH, Ignored, JsonObject, Neutral, Text
from paceline.errors import InvalidRequest
from paceline.request import Grammar, GrammarKind

MAX_CHOICES = 10_000  # texts of guided_choice
MAX_FORMAT_NAME = 64  # characters; OpenAI's bound

NonEmpty = Annotated[Text, Field(min_length=1)]
Schema = Annotated[dict[str, Any], Field(description="A JSON Schema.")]
Choices = Annotated[list[NonEmpty], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


def _schema_form(value: Any) -> str | None:
    return "text" if isinstance(value, str) else f"{BRANCH}schema" if isinstance(value, dict) else None


SchemaOrText = Annotated[
    Annotated[NonEmpty, Tag("text")] | Annotated[Schema, Tag(f"{BRANCH}schema")],
    Discriminator(_schema_form, "schema_form", "must be a JSON Schema, as an object or as text"),
]


class PlainFormat(JsonObject):
    """Any text."""

    type: Literal["text"]
    """Any text: the same as no format."""


class JsonObjectFormat(JsonObject):
    """Some JSON object."""

    type: Literal["json_object"]
    """The text is a JSON object."""


class NamedSchema(JsonObject):
    """A JSON Schema with a name."""

    name: Annotated[Text, Field(min_length=1, max_length=MAX_FORMAT_NAME)]
    """What the schema describes. The model does not see it."""
    schema_: Annotated[Schema, Field(alias="schema")]
    """The JSON Schema that the text fits."""
    strict: bool | None = None
    """The text fits the schema either way."""
    description: Ignored = None


class JsonSchemaFormat(JsonObject):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    """The text is JSON that fits the schema."""
    json_schema: NamedSchema
    """The schema."""


def _format_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"{BRANCH}{kind}" if kind in ("text", "json_object", "json_schema") else None


ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag(f"{BRANCH}text")]
    | Annotated[JsonObjectFormat, Tag(f"{BRANCH}json_object")]
    | Annotated[JsonSchemaFormat, Tag(f"{BRANCH}json_schema")],
    Discriminator(_format_kind, "format_kind", "must be an object with type 'text', 'json_object' or 'json_schema'"),
]


class StructuredOutputs(JsonObject):
    """What the text must be: one of the ways to say it."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    """JSON that fits this JSON Schema."""
    regex: NonEmpty | None = None
    """A text that this regular expression matches as a whole."""
    choice: Choices | None = None
    """One of these texts."""
    grammar: NonEmpty | None = None
    """A text of this context-free grammar."""
    json_object: bool | None = None
    """Some JSON object."""
    structural_tag: Annotated[Any, Neutral()] = None
    whitespace_pattern: Annotated[Any, Neutral()] = None
    disable_any_whitespace: Annotated[Any, Neutral(False)] = None
    disable_additional_properties: Annotated[Any, Neutral(False)] = None
    disable_fallback: Ignored = None
    backend: Ignored = None


class FormatFields(JsonObject):
    """Fields that say what the text must be. At most one of them may."""

    response_format: ResponseFormat | None = None
    """What the text must be: any text, a JSON object, or JSON that fits a schema."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's way to say what the text must be."""
    guided_json: SchemaOrText | None = None
    """JSON that fits this JSON Schema: vLLM's older way."""
    guided_regex: NonEmpty | None = None
    """A text that this regular expression matches as a whole: vLLM's older way."""
    guided_choice: Choices | None = None
    """One of these texts: vLLM's older way."""
    guided_grammar: NonEmpty | None = None
    """A text of this context-free grammar: vLLM's older way."""
    guided_json_object: bool | None = None
    """Some JSON object: vLLM's older way."""
    json_schema: NonEmpty | None = None
    """JSON that fits this JSON Schema, which is text: SGLang's way."""
    regex: NonEmpty | None = None
    """A text that this regular expression matches as a whole: SGLang's way."""
    ebnf: NonEmpty | None = None
    """A text of this context-free grammar: SGLang's way."""


def grammar_of(asked: FormatFields) -> tuple[str, Grammar | None]:
    """The field that says what the text must be, and what it says; an empty name and None for any text. Raises
    InvalidRequest when several do, or one cannot be written down."""
    given = [
        (name, kind, source) for name, kind, source in _formats(asked) if source is not None and source is not False
    ]
    if not given:
        return "", None
    if len(given) > 1:
        raise InvalidRequest(given[1][0], f"and {given[0][0]} both say what the text must be; give one of them")
    ((name, kind, source),) = given
    return name, Grammar(kind, _source(name, source))


def _formats(asked: FormatFields) -> Iterator[tuple[str, GrammarKind, Any]]:
    """Every way to say it: its path, what it is, and what it says."""
    match asked.response_format:
        case JsonObjectFormat():
            yield "response_format", GrammarKind.JSON_OBJECT, True
        case JsonSchemaFormat(json_schema=named):
            yield "response_format.json_schema.schema", GrammarKind.JSON_SCHEMA, named.schema_
    if (ways := asked.structured_outputs) is not None:
        yield "structured_outputs.json", GrammarKind.JSON_SCHEMA, ways.json_
        yield "structured_outputs.regex", GrammarKind.REGEX, ways.regex
        yield "structured_outputs.choice", GrammarKind.CHOICE, ways.choice
        yield "structured_outputs.grammar", GrammarKind.EBNF, ways.grammar
        yield "structured_outputs.json_object", GrammarKind.JSON_OBJECT, ways.json_object
    yield "guided_json", GrammarKind.JSON_SCHEMA, asked.guided_json
    yield "guided_regex", GrammarKind.REGEX, asked.guided_regex
    yield "guided_choice", GrammarKind.CHOICE, asked.guided_choice
    yield "guided_grammar", GrammarKind.EBNF, asked.guided_grammar
    yield "guided_json_object", GrammarKind.JSON_OBJECT, asked.guided_json_object
    yield "json_schema", GrammarKind.JSON_SCHEMA, asked.json_schema
    yield "regex", GrammarKind.REGEX, asked.regex
    yield "ebnf", GrammarKind.EBNF, asked.ebnf


def _source(name: str, said: Any) -> str:
    if said is True:
        return ""
    if isinstance(said, str):
        return said
    check_values(name, said)
    try:
        return json.dumps(said, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest(name, "is nested too deeply") from None
