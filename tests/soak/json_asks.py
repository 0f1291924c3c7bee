"""Requests whose answers must be JSON: of schemas and of tools, generated, and from a public suite where its folder is
there."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import pytest

from cluster.verification.answers import Answer
from cluster.verification.asked import Asked, request_of
from paceline.errors import InvalidRequest
from paceline.grammar.compile import GrammarCompiler
from paceline.request import Grammar, GrammarKind

jsonschema = pytest.importorskip("jsonschema")
Schema = dict[str, Any]
NAMES = ("name", "colour", "size_in_cm", "is_new", "tags", "origin", "items", "weight")
WORDS = ("red", "reddish", "green", "a longer text, with a comma", "ä ☂", "none")
TOOLS = ("get_weather", "book", "search")
MAX_TOKENS = 160  # a byte each
DIGITS = 1000  # of what numbers are divided to
NOT_JUDGED = ("$ref", r"\\p{")  # others are fetched; Python's regular expressions have no Unicode classes
SUITE_SHARE = 0.4  # of schemas, where the suite is there
TOOL_SHARE = 0.3
BESIDES_SHARE = 0.3
# What else requests ask for: several choices, log-probabilities, stop texts within JSON, an end in its midst.
BESIDES: tuple[dict[str, Any], ...] = (
    {"n": 4, "top_logprobs": 2},
    {"stop": [", "]},
    {"stop": ['": "', "zz"], "include_stop_str_in_output": True},
    {"max_tokens": 9},
    {"min_tokens": 30, "frequency_penalty": 0.5},
)


@dataclass(frozen=True)
class JsonAsk:
    """One request, and what its answer must be."""

    asked: Asked
    schema: Schema | None  # of the text; None: tools are called
    tools: Mapping[str, Schema]  # of the arguments, by the tool's name

    def judge(self, answer: Answer) -> str:
        """valid, cut (by the length, or by a stop text) or what is wrong."""
        if answer.finish_reason == "length":
            return "cut"
        word = self._judge_whole(answer)
        return "cut" if word != "valid" and self.asked.options.get("stop") else word

    def _judge_whole(self, answer: Answer) -> str:
        try:
            if self.schema is not None:
                validate(self.schema, answer.text)
                return "valid"
            for name, arguments in answer.tool_calls:
                validate(self.tools[name], arguments)
        except (ValueError, KeyError, jsonschema.ValidationError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return "valid" if answer.tool_calls else "no tool was called"


def validate(schema: Schema, text: str) -> None:
    """Raises ValidationError, or ValueError for what is no JSON. Numbers are decimals, as JSON has them: as floats
    -5.1167 is no multiple of 0.0001."""
    with localcontext(prec=DIGITS):
        jsonschema.Draft202012Validator(decimals(json.dumps(schema))).validate(decimals(text))


def decimals(text: str) -> Any:
    """What a text of JSON says, with decimals for its fractions."""
    return json.loads(text, parse_float=_number)


def _number(text: str) -> int | float | Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # its exponent is out of all bounds
        return float(text)
    whole = number.adjusted() < DIGITS and number == number.to_integral_value()
    return int(number) if whole else number


def make_json_asks(seed: int, count: int, public: Sequence[Schema] = ()) -> list[JsonAsk]:
    """``count`` requests, at temperature 0 and 1 in turns. public: schemas of others, which are taken too."""
    rng = random.Random(f"json {seed}")
    asks = []
    for number in range(1, count + 1):
        options = {"seed": rng.randrange(1 << 40), "max_tokens": MAX_TOKENS, "temperature": float(number % 2)}
        options |= rng.choice(BESIDES) if rng.random() < BESIDES_SHARE else {}
        if rng.random() < TOOL_SHARE:
            asks.append(_of_tools(rng, number, options))
        else:
            schema = rng.choice(public) if public and rng.random() < SUITE_SHARE else an_object(rng, 2)
            prompt = {"prompt": f"{number}: JSON, please. {rng.choice(WORDS)} {rng.choice(NAMES)}"}
            asked = request_of(number, prompt | options | {"response_format": schema})
            asks.append(JsonAsk(asked, schema, {}))
    return asks


def _of_tools(rng: random.Random, number: int, options: dict[str, Any]) -> JsonAsk:
    schemas = {name: an_object(rng, 1) for name in rng.sample(TOOLS, rng.randint(1, 2))}
    tools = [{"type": "function", "function": {"name": n, "parameters": schema}} for n, schema in schemas.items()]
    choice = rng.choice(["required", *schemas])
    fields = {
        "messages": [{"role": "user", "content": f"{number}: call a tool. {rng.choice(WORDS)}"}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": rng.random() < 0.5,
    }
    called = schemas if choice == "required" else {choice: schemas[choice]}
    return JsonAsk(request_of(number, fields | options), None, called)


def an_object(rng: random.Random, depth: int) -> Schema:
    """A schema whose values are short, so that a model that knows nothing ends them."""
    names = rng.sample(NAMES, rng.randint(1, 3))
    properties = {name: _value(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> Schema:
    kinds = ["text", "number", "enum", "boolean", "pattern", "const"]
    kinds += ["object", "array", "either"] if depth > 0 else []
    match rng.choice(kinds):
        case "text":
            return {"type": "string", "maxLength": rng.randint(1, 8)}
        case "number":
            return {"type": "integer", "minimum": rng.randint(-20, 5), "maximum": rng.randint(6, 2000)}
        case "enum":
            return {"enum": [*rng.sample(WORDS, 3), None, rng.randint(0, 99)]}
        case "boolean":
            return {"type": "boolean"}
        case "pattern":
            return {"type": "string", "pattern": r"^[A-Z]{2}-\d{3}(x|yz)?$"}
        case "const":
            return {"const": {"kind": rng.choice(WORDS)}}
        case "object":
            return an_object(rng, depth)
        case "array":
            return {"type": "array", "items": _value(rng, depth - 1), "maxItems": rng.randint(1, 3)}
        case _:
            return {"anyOf": [_value(rng, depth - 1), {"type": "null"}]}


def public_schemas(suite: Path, compiler: GrammarCompiler) -> list[Schema]:
    """Those of the schemas in a draft's folder of JSON-Schema-Test-Suite that stand alone and are taken."""
    found = []
    for file in sorted(suite.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            schema = group["schema"]
            if not isinstance(schema, dict) or any(word in json.dumps(schema) for word in NOT_JUDGED):
                continue
            with suppress(InvalidRequest):
                compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
                found.append(schema)
    return found
