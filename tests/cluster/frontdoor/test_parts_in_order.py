"""Thoughts, text and calls of an answer come in its order, and a call comes whole, however its tokens are told."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from cluster.frontdoor import openai_tools
from cluster.frontdoor.messages.answer import Answer as Messages
from cluster.frontdoor.responses.answer import Answer as Responses
from cluster.frontdoor.responses.parse import parse, read_body
from cluster.routing.choice import ChoiceRun, with_parts
from paceline.parsing.answer import AnswerFormat, AnswerParts, CallableTool
from paceline.parsing.parser import make_parser
from paceline.request import FinishReason, SamplingParams, SequenceRequest
from paceline.results import Chunk, ToolCallPart
from tests.support.byte_text import ByteDetokenizer, ByteTokenizer

CALL = '<tool_call>\n{{"name": "weather", "arguments": {{"city": "{}"}}}}\n</tool_call>'
TEXT = f"hm</think>Sure.{CALL.format('Rome')}{CALL.format('Oslo')}Done.{CALL.format('Bonn')}End."
FORM = AnswerFormat("hermes", "think", True, (CallableTool("weather"),))
PROMPT, SEED, COUNT = (1, 2), 5, 80
TOLD = [
    "hm",
    "Sure.",
    ("weather", '{"city": "Rome"}'),
    ("weather", '{"city": "Oslo"}'),
    "Done.",
    ("weather", '{"city": "Bonn"}'),
    "End.",
]


def chunks(cuts: Sequence[int]) -> list[Chunk]:
    """What a router makes of tokens, here bytes, that are told together between cuts."""
    tokenizer = ByteTokenizer()
    sequence = SequenceRequest("r", PROMPT, SamplingParams(max_tokens=900, seed=SEED))
    detokenizer = ByteDetokenizer(tokenizer, PROMPT, ())
    run = ChoiceRun(0, "r", sequence, detokenizer, 0.0, True, make_parser(FORM, PROMPT, SEED))
    made = [run.take(start, list(TEXT.encode())[start:end], [], ()) for start, end in pairwise(cuts)]
    run.end(FinishReason.STOP)
    return [*(chunk for chunk in made if chunk is not None), run.complete()]


def ways() -> Iterator[list[Chunk]]:
    """All at once, each token by itself, and cut at random."""
    end, rng = len(TEXT), random.Random(1)
    yield chunks([0, end])
    yield chunks(range(end + 1))
    for _ in range(COUNT):
        yield chunks([0, *sorted(rng.sample(range(1, end), rng.randint(1, 12))), end])


def test_blocks_of_messages() -> None:
    for made in ways():
        answer = Messages(SimpleNamespace(max_tokens=900), "id", "m")  # type: ignore[arg-type]
        events = [event for chunk in made for event in answer.take(chunk)]
        answer.complete(made[-1].completion)  # type: ignore[arg-type]
        blocks = answer.body()["content"]
        found = [
            (block["name"], json.dumps(block["input"]))
            if block["type"] == "tool_use"
            else block.get("text") or block.get("thinking")
            for block in blocks
        ]
        assert found == TOLD
        places = [event["index"] for event in events]
        assert places == sorted(places)  # a block that is closed stays so


def test_items_of_responses() -> None:
    for made in ways():
        answer = Responses(parse(read_body({"model": "m", "input": "hi", "stream": True}), (), "resp_1"), "m", 0)
        events = [event for chunk in made for event in answer.take(chunk)]
        assert made[-1].completion is not None
        events += answer.complete(made[-1].completion)
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        calls = [(item["name"], item["arguments"]) for item in done if item["type"] == "function_call"]
        assert calls == [told for told in TOLD if isinstance(told, tuple)]
        kinds = {"reasoning": "r", "message": "m", "function_call": "c"}
        assert "".join(kinds[item["type"]] for item in done) == "rmccmcm"
        assert not answer.in_order  # for every way alike: whether a stream has ids does not depend on it


def test_steps_are_the_chunk() -> None:
    """Each has a part of one call at most, which clients of chat completions rely on. Tokens come with the first, the
    end with the last. Mutants: the completion with each; the tokens with each."""
    several = 0
    for made in ways():
        for chunk in made:
            steps = chunk.in_order or (chunk,)
            several += len(steps) > 1
            assert "".join(step.text for step in steps) == chunk.text
            assert "".join(step.reasoning for step in steps) == chunk.reasoning
            assert all(len(step.tool_calls) <= 1 for step in steps)
            assert steps[0].token_ids == chunk.token_ids
            assert not any(step.token_ids for step in steps[1:])
            assert [step.completion for step in steps] == [None] * (len(steps) - 1) + [chunk.completion]
    assert several > COUNT


def test_deltas_of_chat() -> None:
    """As a client reads them that looks at the first part of an event alone."""
    for made in ways():
        calls: dict[int, list[str]] = {}
        for step in (step for chunk in made for step in chunk.in_order or (chunk,)):
            part: dict[str, Any]
            for part in openai_tools.delta(step).get("tool_calls", [])[:1]:
                call = calls.setdefault(part["index"], ["", ""])
                call[0] += part["function"].get("name", "")
                call[1] += part["function"]["arguments"]
        assert [tuple(call) for call in calls.values()] == [told for told in TOLD if isinstance(told, tuple)]


def test_the_end_comes_with_the_last_step() -> None:
    """Mutant: with each."""
    parts = AnswerParts("a") + AnswerParts(tool_calls=(ToolCallPart(0, "id", "weather"),)) + AnswerParts("b")
    completion = chunks([0, len(TEXT)])[-1].completion
    steps = with_parts(Chunk(0, 5, completion=completion), parts).in_order
    assert [(step.text, step.completion) for step in steps] == [("a", None), ("b", completion)]
    assert [call.name for step in steps for call in step.tool_calls] == ["weather"]
