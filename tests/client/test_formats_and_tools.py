"""What the SDK makes of formats, chats and tools, and of answers that have them. What is no request is told before
anything is sent."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from paceline.client import (
    AsyncClient,
    Chunk,
    Client,
    FinishReason,
    IncompleteAnswer,
    PacelineError,
    ToolCall,
    ToolCallPart,
    choices_of,
)
from paceline.client.convert import generate_request, parse_request, tokenize_request
from paceline.client.progress import StreamProgress
from paceline.client.testing import Answer, FakeServer
from paceline.request import Grammar, GrammarKind
from paceline.v1 import inference_pb2
from paceline.wire import grammar_from_proto

FUNCTION: dict[str, Any] = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


class Person(BaseModel):
    """What an answer is read as."""

    name: str
    born: int

    @field_validator("born")
    @classmethod
    def _not_in_the_future(cls, born: int) -> int:
        if born > 3000:
            raise ValueError("not born yet")
        return born


ADA = '{"name": "Ada", "born": 1815}'


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({"response_format": Person}, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(Person.model_json_schema()))),
        ({"response_format": {"enum": ["é", 1]}}, Grammar(GrammarKind.JSON_SCHEMA, '{"enum": ["é", 1]}')),
        ({"response_format": "json_object"}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"regex": "[ab]+"}, Grammar(GrammarKind.REGEX, "[ab]+")),
        ({"grammar": 'start: "a"'}, Grammar(GrammarKind.EBNF, 'start: "a"')),
        ({"choice": ("yes", "nö")}, Grammar(GrammarKind.CHOICE, '["yes", "nö"]')),
    ],
)
def test_formats_are_grammars(options: dict[str, Any], grammar: Grammar) -> None:
    message = generate_request("hi", options)
    assert grammar_from_proto(message.sampling.grammar) == grammar
    assert not generate_request("hi", dict.fromkeys(options)).sampling.HasField("grammar")


def test_a_chat_with_everything() -> None:
    call = ToolCall("c1", "weather", '{"city": "Rome"}')
    as_openai = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = {"role": "assistant", "content": None, "reasoning": "look it up", "tool_calls": [call, as_openai]}
    answered = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"}
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True, "description": "Now."}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "template_values": {"enable_thinking": False},
        "continue_final_message": True,
    }
    chat = generate_request([*HELLO, asked, answered], options).chat
    assert [(turn.role, turn.content) for turn in chat.messages[1:]] == [("assistant", ""), ("tool", "sunny")]
    assert [(one.id, one.name, one.arguments) for one in chat.messages[1].tool_calls] == [
        ("c1", "weather", '{"city": "Rome"}')
    ] * 2
    assert chat.messages[1].reasoning == "look it up"
    assert (chat.messages[2].tool_call_id, chat.messages[2].name) == ("c1", "weather")
    (tool,) = chat.tools
    assert (tool.name, tool.description, tool.strict) == ("weather", "Now.", True)
    assert json.loads(tool.parameters) == {"type": "object", "properties": {}}
    assert (chat.tool_choice, chat.one_tool_call) == (inference_pb2.TOOL_CHOICE_REQUIRED, True)
    assert (json.loads(chat.template_values), chat.continue_final_message) == ({"enable_thinking": False}, True)
    assert tokenize_request([*HELLO, asked, answered], options).chat == chat  # so that lengths are those of the prompt


@pytest.mark.parametrize(
    ("choice", "kind", "name"),
    [
        ("auto", inference_pb2.TOOL_CHOICE_AUTO, ""),
        ("none", inference_pb2.TOOL_CHOICE_NONE, ""),
        ("weather", inference_pb2.TOOL_CHOICE_NAMED, "weather"),
        ({"name": "none"}, inference_pb2.TOOL_CHOICE_NAMED, "none"),
        ({"type": "function", "function": {"name": "weather"}}, inference_pb2.TOOL_CHOICE_NAMED, "weather"),
    ],
)
def test_tool_choices(choice: Any, kind: int, name: str) -> None:
    chat = generate_request(HELLO, {"tools": [WEATHER], "tool_choice": choice}).chat
    assert (chat.tool_choice, chat.tool_name) == (kind, name)


LOOP: dict[str, Any] = {}
LOOP["self"] = LOOP


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("hi", {"response_format": "json_object", "regex": "a"}, "response_format and regex"),
        ("hi", {"response_format": "json"}, "json_object"),
        ("hi", {"response_format": int}, "pydantic"),
        ("hi", {"response_format": {"maximum": float("nan")}}, "not JSON"),
        ("hi", {"response_format": LOOP}, "not JSON"),
        ("hi", {"choice": "yes"}, "list of texts"),
        ("hi", {"choice": [1]}, "list of texts"),
        ("hi", {"regex": ["a"]}, "regex is a text"),
        ("hi", {"tools": [WEATHER]}, "tools is for chats"),
        (HELLO, {"tools": [{"name": "weather"}]}, "a tool is"),
        (HELLO, {"tools": [{"type": "function", "function": {"name": "x", "params": {}}}]}, "no 'params'"),
        (HELLO, {"tools": ["weather"]}, "a tool is"),
        (HELLO, {"tool_choice": {"tool": "x"}}, "tool_choice is"),
        (HELLO, {"parallel_tool_calls": "no"}, "parallel_tool_calls is True or False"),
        (HELLO, {"template_values": "x"}, "template_values is a mapping"),
        ([{"role": "user"}], {}, "a content unless"),
        ([{"content": "x"}], {}, "has a role"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "a call in tool_calls"),
    ],
)
def test_what_is_no_request(prompt: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        generate_request(prompt, options)


def test_a_model_that_is_parsed_is_the_only_format() -> None:
    with pytest.raises(TypeError, match="response_format is the model"):
        parse_request(Person, "hi", {"response_format": Person})
    with pytest.raises(TypeError, match=r"response_format and regex|regex and response_format"):
        parse_request(Person, "hi", {"regex": "a"})


async def test_objects_and_answers_that_are_none() -> None:
    late = ADA.replace("1815", "3001")
    with FakeServer(ADA, ADA, ADA, late, ADA) as server, Client(server.address) as client:
        assert client.parse(Person, "Who?", seed=1) == Person(name="Ada", born=1815)
        async with AsyncClient(server.address) as other:
            assert (await other.parse(Person, HELLO)).born == 1815
        with pytest.raises(IncompleteAnswer, match=r"after 10 characters.*max_tokens") as caught:
            client.parse(Person, "Who?", max_tokens=10)
        assert (caught.value.text, caught.value.finish_reason) == (ADA[:10], "length")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (str(copy), copy.text) == (str(caught.value), ADA[:10])
        with pytest.raises(ValidationError, match="not born yet"):
            client.parse(Person, "Who?")
        done = choices_of(client.stream("Who?", response_format=Person))
        assert done[0].parsed(Person).name == "Ada"


def test_an_answer_goes_back_into_the_chat() -> None:
    calls = [ToolCall("c1", "weather", '{"city": "Rome"}'), ToolCall("c2", "weather", "{}")]
    with FakeServer(Answer("", "hm", calls), "Sunny.") as server, Client(server.address) as client:
        done = client.chat(HELLO, tools=[WEATHER])
        assert (done.tool_calls, done.completion.finish_reason) == (tuple(calls), FinishReason.TOOL_CALLS)
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in done.tool_calls]
        assert client.chat([*HELLO, done.message, *answers], tools=[WEATHER]).text == "Sunny."
        assert server.requests[1].prompt[1] == done.message
        assert done.message == {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": calls}
        with pytest.raises(IncompleteAnswer, match="tool_calls"):
            done.parsed(Person)


def chunk_with(*parts: ToolCallPart, first_index: int = 0) -> inference_pb2.GenerateChunk:
    return inference_pb2.GenerateChunk(
        first_index=first_index,
        token_ids=[1],
        tool_calls=[inference_pb2.ToolCallPart(**vars(part)) for part in parts],
    )


@pytest.mark.parametrize(
    "parts",
    [
        [ToolCallPart(0, "c1", "weather")],  # again
        [ToolCallPart(2, "c3", "weather")],  # the second one was lost
        [ToolCallPart(1, arguments="{}")],  # the beginning of the second one was lost
    ],
)
def test_a_router_that_goes_on_with_another_call_is_not_believed(parts: list[ToolCallPart]) -> None:
    progress = StreamProgress(generate_request(HELLO, {"tools": [WEATHER]}))
    progress.take(chunk_with(ToolCallPart(0, "c1", "weather"), ToolCallPart(0, arguments="{")))
    progress.take(chunk_with(ToolCallPart(0, arguments="}"), first_index=1))
    with pytest.raises(PacelineError, match="tool call"):
        progress.take(chunk_with(*parts, first_index=2))


def test_choices_of_a_stream_that_did_not_end() -> None:
    with pytest.raises(ValueError, match="choice 1 has not ended"):
        choices_of([Chunk(1, 0, (1,), "a")])


def test_the_sdk_and_its_fake_load_nothing_heavy() -> None:
    code = (
        "import sys, paceline.client, paceline.client.testing\n"
        "heavy = {'torch', 'ray', 'redis', 'pydantic', 'numpy', 'cluster', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
