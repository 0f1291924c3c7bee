"""A grammar's text in one process: valid, and the same whatever drafts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.request import FinishReason, Grammar, GrammarKind, SequenceRequest, SpeculationParams
from tests.support.asked import Sampling
from tests.support.grammar_engines import answers, grammar_request, grammar_runner, text_of

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 250},
        "inner": {
            "type": "object",
            "properties": {"temperature": {"type": "boolean"}},
            "required": ["temperature"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "size", "inner"],
    "additionalProperties": False,
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, r"(ab|cd){3,5}[0-9]{4}(!|\?)")
CHOICE = Grammar(GrammarKind.CHOICE, json.dumps(["red", "green", "greenish", "blue"]))
LARK = Grammar(GrammarKind.EBNF, 'start: item ("," item)*\nitem: /[a-c]{2}/ | "(" start ")"\n')
GBNF = Grammar(GrammarKind.EBNF, 'root ::= "yes" | "no" [.!] (" " root)?\n')
GRAMMARS = (JSON, REGEX, CHOICE, LARK, GBNF)

SAMPLED: Sampling = {"temperature": 1.0}
LAYOUTS: tuple[dict[str, object], ...] = (
    {"drafter": "none"},
    {"drafter": "ngram"},
    {"drafter": "ngram", "tree": "static", "tree_width": 3},
    {"drafter": "suffix", "tree": "dynamic", "tree_width": 2},
    {"drafter": "trie", "tree": "static", "tree_width": 2},
    {"drafter": "lookahead", "num_draft_tokens": 8, "tree": "static", "tree_width": 2},
    {"drafter": "ngram", "adaptive": "goodput"},
    {"drafter": "auto"},
    {"drafter": "mtp", "num_draft_tokens": 4, "tree": "static", "tree_width": 2},
    {"drafter": "mtp", "num_draft_tokens": 3, "draft_sampling": "sampled", "tree": "static", "tree_width": 2},
)
RULES: tuple[dict[str, object], ...] = (
    {"acceptance": "rejection", "drafter": "mtp", "num_draft_tokens": 3, "draft_sampling": "sampled"},
    {"acceptance": "rejection", "drafter": "ngram"},
    {"acceptance": "recursive", "drafter": "mtp", "tree": "static", "tree_width": 3, "draft_sampling": "sampled"},
    {"acceptance": "recursive", "drafter": "ngram", "tree": "static", "tree_width": 3},
    {"acceptance": "typical", "drafter": "mtp", "tree": "static", "tree_width": 3},
)


def requests(temperature: float) -> list[SequenceRequest]:
    """One of every grammar, and one without."""
    asked = [grammar_request(g, index=i, temperature=temperature, max_tokens=96) for i, g in enumerate(GRAMMARS)]
    return [*asked, grammar_request(None, index=9, temperature=temperature, max_tokens=24)]


def plain(folder: Path, temperature: float) -> list[list[int]]:
    """Token by token: no drafter and no forced drafts, each request alone."""
    runner = grammar_runner(folder, drafter="none", num_draft_tokens=0)
    off = SpeculationParams(num_draft_tokens=0)
    alone = [
        SequenceRequest(r.request_id, r.prompt_token_ids, r.params, speculation=off) for r in requests(temperature)
    ]
    return [answers(runner, [request])[0].token_ids for request in alone]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_text_is_that_of_plain_decoding(tmp_path: Path, layout: dict[str, object], temperature: float) -> None:
    done = answers(grammar_runner(tmp_path, **layout), requests(temperature))
    assert [one.token_ids for one in done] == plain(tmp_path, temperature)
    drafters = set().union(*(one.stats.rounds_by_drafter for one in done))
    assert "grammar" in drafters


@pytest.mark.parametrize("cut_every", [1, 4])
def test_a_replay_from_any_cut_goes_on_alike(tmp_path: Path, cut_every: int) -> None:
    """dynamo #7930, dynamo #7634: where a sequence stands follows from its tokens."""
    whole, runner = plain(tmp_path, 1.0), grammar_runner(tmp_path, drafter="ngram")
    for request, tokens in zip(requests(1.0)[:5], whole, strict=False):
        cuts = range(1, len(tokens), cut_every)
        resumed = [replace(request, request_id=f"cut {i}", output_token_ids=tuple(tokens[:i])) for i in cuts]
        done = answers(runner, resumed)
        assert [tokens[:i] + one.token_ids for i, one in zip(cuts, done, strict=True)] == [tokens] * len(cuts)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
def test_every_acceptance_rule_keeps_to_the_grammar(tmp_path: Path, rule: dict[str, object]) -> None:
    """Greedy answers are plain decoding's under every rule; sampled ones are of the grammar."""
    runner = grammar_runner(tmp_path, **rule)
    assert [one.token_ids for one in answers(runner, requests(0.0))] == plain(tmp_path, 0.0)
    for seed in range(4):
        asked = [replace(r, params=replace(r.params, seed=seed)) for r in requests(1.3)]
        check_texts([text_of(one.token_ids) for one in answers(runner, asked)])


def check_texts(texts: list[str]) -> None:
    """Answers to ``requests`` are of their grammars, those that were cut apart."""
    if texts[0].endswith("}}"):
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch(REGEX.source, texts[1])
    assert texts[2] in json.loads(CHOICE.source)
    assert re.fullmatch(r"(no[.!] )*(yes|no[.!]|no)?( |y|ye|n)?", texts[4])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.7])
def test_answers_are_of_their_grammars(tmp_path: Path, temperature: float) -> None:
    done = answers(grammar_runner(tmp_path, drafter="ngram"), requests(temperature))
    texts = [text_of(one.token_ids) for one in done]
    assert [one.finish_reason for one in done[1:3]] == [FinishReason.STOP] * 2
    if done[0].finish_reason is FinishReason.STOP:
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert re.fullmatch(REGEX.source, texts[1])
    assert texts[2] in json.loads(CHOICE.source)
    if done[4].finish_reason is FinishReason.STOP:
        assert re.fullmatch(r"(no[.!] )*(yes|no[.!])", texts[4])
