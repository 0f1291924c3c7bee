"""Grammars with the real model and its vocabulary of 49,152, in one process; tests/e2e/test_serve.py serves some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.request import FinishReason, Grammar, GrammarKind, SamplingParams, SequenceRequest, SpeculationParams
from paceline.text.tokenizer import Tokenizer
from tests.support.grammar_engines import answers
from tests.support.needs import needs_kernels
from tests.support.real_engines import Engines

jsonschema = pytest.importorskip("jsonschema")
pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(400)]

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "favourite_colour": {"enum": ["red", "reddish", "green", "blue"]},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["first_name", "favourite_colour", "age_in_years", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.REGEX, r"(Mon|Tues|Wednes|Thurs|Fri)day, \d{1,2} (January|June|July) \d{4}"),
    Grammar(GrammarKind.CHOICE, json.dumps(["positive", "negative", "neither positive nor negative"])),
    Grammar(
        GrammarKind.EBNF,
        'start: %json {"type": "integer", "minimum": 0, "maximum": 99} " apples and " %json {"type": "boolean"}',
    ),
)
QUESTION = "Describe Ada Lovelace as JSON, or name a day."
DRAFTERS: tuple[dict[str, object], ...] = (
    {"drafter": "none"},
    {"drafter": "ngram", "num_draft_tokens": 6, "tree": "static", "tree_width": 2},
    {"drafter": "mtp", "num_draft_tokens": 4},
    {"drafter": "lookahead", "num_draft_tokens": 8, "tree": "static", "tree_width": 2},
)


def requests(folder: Path, temperature: float) -> list[SequenceRequest]:
    tokenizer = Tokenizer.from_folder(folder)
    prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}]))
    stops = tuple(tokenizer.eos_token_ids)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=90, stop_token_ids=stops)
    return [SequenceRequest(f"g{i}", prompt, replace(params, grammar=g)) for i, g in enumerate(GRAMMARS)]


@pytest.fixture(scope="module")
def engines(smollm2_folder: Path) -> Engines:
    return Engines(smollm2_folder, "bf16", batch=8)


def test_text_is_that_of_plain_decoding(smollm2_folder: Path, engines: Engines) -> None:
    """Sampled; tiny models do the same greedily (test_grammar_in_engine.py)."""
    asked = requests(smollm2_folder, 1.0)
    off = SpeculationParams(num_draft_tokens=0)
    alone = engines.variant(drafter="none")
    plain = [answers(alone, [replace(one, speculation=off)])[0] for one in asked]
    assert [one.finish_reason for one in plain] == [FinishReason.STOP] * len(asked)
    text = Tokenizer.from_folder(smollm2_folder).decode(plain[0].token_ids)
    jsonschema.validate(json.loads(text), PERSON)
    for options in DRAFTERS:
        done = answers(engines.variant(**options), asked)
        assert [one.token_ids for one in done] == [one.token_ids for one in plain], options
        assert sum(one.stats.rounds_by_drafter.get("grammar", 0) for one in done) > 0
