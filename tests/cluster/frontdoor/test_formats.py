"""Every way to say what the text must be becomes one grammar, under the name that the client used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.frontdoor.openai_parse import ApiRequest, parse_chat, parse_completion
from paceline.errors import InvalidRequest
from paceline.request import GrammarKind
from tests.support.http_app import CHAT, COMPLETION

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TEXT = json.dumps(SCHEMA)
SAID: list[tuple[dict[str, Any], GrammarKind, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, None, "response_format"),
    ({"response_format": NAMED}, GrammarKind.JSON_SCHEMA, SCHEMA, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": TEXT}}, GrammarKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE, ["a", "b"], "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "g"}}, GrammarKind.EBNF, "g", "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_OBJECT, None, "structured_outputs.json_object"),
    ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, SCHEMA, "guided_json"),
    ({"guided_json": TEXT}, GrammarKind.JSON_SCHEMA, TEXT, "guided_json"),
    ({"guided_regex": "[ab]"}, GrammarKind.REGEX, "[ab]", "guided_regex"),
    ({"guided_choice": ["é"]}, GrammarKind.CHOICE, ["é"], "guided_choice"),
    ({"guided_grammar": "root ::= 'a'"}, GrammarKind.EBNF, "root ::= 'a'", "guided_grammar"),
    ({"guided_json_object": True}, GrammarKind.JSON_OBJECT, None, "guided_json_object"),
    ({"json_schema": TEXT}, GrammarKind.JSON_SCHEMA, TEXT, "json_schema"),
    ({"regex": "a|b"}, GrammarKind.REGEX, "a|b", "regex"),
    ({"ebnf": "root ::= 'a'"}, GrammarKind.EBNF, "root ::= 'a'", "ebnf"),
]


def both(more: dict[str, Any]) -> list[ApiRequest]:
    """A completion and a chat with the same fields."""
    return [parse_completion({**COMPLETION, **more}, "id"), parse_chat({**CHAT, **more}, "id")]


@pytest.mark.parametrize(("fields", "kind", "said", "name"), SAID)
def test_each_way_is_a_grammar_under_its_own_name(
    fields: dict[str, Any], kind: GrammarKind, said: Any, name: str
) -> None:
    for parsed in both(fields):
        grammar = parsed.generation.sampling.grammar
        assert grammar is not None
        assert grammar.kind is kind
        if isinstance(said, (dict, list)):
            assert json.loads(grammar.source) == said
        else:
            assert grammar.source == (said or "")
        assert parsed.renamed(InvalidRequest("grammar", "is too large")).field == name
        assert parsed.renamed(InvalidRequest("grammar.source", "is odd", "x")).field == f"{name}.source"
        assert parsed.renamed(InvalidRequest("grammar", "is odd", "x")).code == "x"


NOTHING: list[dict[str, Any]] = [
    {"response_format": {"type": "text"}},
    {"structured_outputs": {}},
    {"structured_outputs": {"json_object": False, "backend": "auto", "disable_any_whitespace": False}},
    {"guided_json_object": False, "guided_json": None, "regex": None},
]


@pytest.mark.parametrize("fields", NOTHING)
def test_these_say_nothing(fields: dict[str, Any]) -> None:
    for parsed in both(fields):
        assert parsed.generation.sampling.grammar is None
        assert parsed.renamed(InvalidRequest("grammar", "x")).field == "grammar"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({"guided_json": SCHEMA, "guided_json_object": True}, "guided_json_object"),
    ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": "json_object"}, "response_format"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": ""}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
    ({"guided_choice": ["a"] * 10_001}, "guided_choice"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"structural_tag": {}}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    for parse, body in ((parse_completion, COMPLETION), (parse_chat, CHAT)):
        with pytest.raises(InvalidRequest) as caught:
            parse({**body, **fields}, "id")
        assert caught.value.field == param
