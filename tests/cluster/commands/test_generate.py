"""``paceline generate`` has every option of the SDK, and what it is given arrives."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.commands.generate import generate
from cluster.commands.generate_options import LEFT_OUT, OWN_FORMS, PANELS
from cluster.frontdoor.service import serve_grpc
from paceline.client import AsyncClient, Client, GenerateOptions
from paceline.client.testing import Answer, FakeServer
from paceline.errors import InvalidRequest
from paceline.results import ToolCall
from tests.support.scripted_nodes import Fleet, fleet, letters

PROMPT = "hello"
TEXT = letters(5, len(PROMPT), 64)
GIVEN: dict[str, Any] = {
    "max_tokens": 9,
    "min_tokens": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 40,
    "min_p": 0.125,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: -1.5, 6: 2.0},
    "seed": 5,
    "stop": ["zzz", "yyy"],
    "stop_token_ids": [7, 8],
    "bad_words": ["xyzzy", "plugh"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": True,
    "ignore_eos": True,
    "top_logprobs": 1,
    "prompt_logprobs": 2,
    "n": 1,
    "num_draft_tokens": 2,
    "tree_width": 3,
    "drafter": "suffix",
    "tree": "static",
    "prediction": "the answer",
    "model": "tiny",
    "request_id": "mine",
    "truncate_prompt_tokens": 100,
    "truncation_side": "right",
    "tenant": "team",
    "priority": 3,
}
IN_CHATS: dict[str, Any] = {
    "tool_choice": "weather",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
}


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[Fleet, str]]:
    async with fleet(**options) as nodes:
        server = await serve_grpc(nodes.router, "127.0.0.1:0")
        try:
            yield nodes, f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)


async def run(*arguments: str) -> Result:
    """The command, on a thread: the server is on this loop."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(generate)
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [PROMPT, *arguments]))


def arguments(name: str, value: Any) -> list[str]:
    """How an option is written on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    values = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
    return [part for item in (values if isinstance(values, list) else [value]) for part in (flag, str(item))]


def test_it_has_every_option_of_the_sdk() -> None:
    options = inspect.signature(generate).parameters
    connection = inspect.signature(Client.__init__).parameters
    asked = {name for name, p in connection.items() if p.kind is p.KEYWORD_ONLY} - {"options", "api_key"}
    own_forms = {option for option, _ in OWN_FORMS.values()}
    flags = get_type_hints(GenerateOptions).keys() - LEFT_OUT - own_forms
    assert get_type_hints(GenerateOptions).keys() == flags | LEFT_OUT | own_forms
    assert {"continue_final_message"} == LEFT_OUT
    own = {"prompt", "server", "tls", "tls_ca", "api_key_file", "chat", "system", "as_json", *OWN_FORMS}
    assert options.keys() == flags | asked | own
    assert {name: options[name].default for name in asked} == {name: connection[name].default for name in asked}
    assert inspect.signature(AsyncClient.__init__).parameters.keys() == connection.keys()
    assert GIVEN.keys() | IN_CHATS.keys() == flags - {"regex", "choice"}  # one format at a time: below


def test_the_help_has_each_option_below_one_heading() -> None:
    placed = [name for names in PANELS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(placed) == inspect.signature(generate).parameters.keys() - {"prompt", "as_json"}
    app = typer.Typer()
    app.command()(generate)
    shown = CliRunner().invoke(app, ["--help"]).output
    headings = [match[1] for match in re.finditer(r"^╭─ (.+?) ─+╮$", shown, re.M)]
    assert headings == ["Arguments", "Options", *PANELS]
    start, end = (shown.index(f"╭─ {title} ") for title in ("Speculation", "Request"))
    assert start < shown.index("--tree-width") < end


async def test_every_option_arrives() -> None:
    written = [part for name, value in GIVEN.items() for part in arguments(name, value)]
    async with served(tree="static", drafter="ngram", drafters="suffix") as (nodes, address):
        done = await run("--server", address, *written)
        assert done.exit_code == 0, done.output
        (sequence,) = nodes.nodes["prefill-0"].sequences
    speculation = sequence.speculation
    for name in ("num_draft_tokens", "tree_width", "drafter", "tree"):
        assert getattr(speculation, name) == GIVEN[name]
    assert speculation.prediction_token_ids == tuple(b"the answer")
    assert (sequence.request_id, sequence.cache_salt) == ("mine", "team")
    for name in GIVEN.keys() - {
        "num_draft_tokens",
        "tree_width",
        "drafter",
        "tree",
        "prediction",
        "model",
        "request_id",
    }:
        if name in ("tenant", "priority", "stop", "bad_words", "truncate_prompt_tokens", "truncation_side"):
            continue  # the router's own
        value = GIVEN[name]
        assert getattr(sequence.params, name) == (tuple(value) if isinstance(value, list) else value), name


async def test_every_option_is_asked_for_as_it_is_given() -> None:
    """Each alone, those too that a router keeps from its nodes."""
    given = GIVEN | IN_CHATS | {"regex": "a", "choice": ["a", "b"]}
    with FakeServer(*["a"] * len(given), model="tiny") as server:
        for name, value in given.items():
            await run("--server", server.address, *arguments(name, value))
            assert server.requests[-1].options == {"max_tokens": 128} | {name: value}
            assert isinstance(server.requests[-1].prompt, list) == (name in IN_CHATS)


async def test_tools_and_values_of_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    said = Answer("Let me see.", tool_calls=[ToolCall("1", "weather", '{"city": "Paris"}')])
    asked = ["--tools", str(tmp_path / "tools.json"), "--template-values", '{"enable_thinking": false}']
    with FakeServer(said, said) as server:
        one = await run("--server", server.address, *asked)
        assert one.output == 'Let me see.\nweather {"city": "Paris"}\n'
        two = await run("--server", server.address, *asked, "--n", "2")
        assert two.output == "".join(f"[{i}] {one.output}" for i in range(2))
        options = {"max_tokens": 128, "tools": tools, "template_values": {"enable_thinking": False}}
        assert server.requests[0].options == options
        assert server.requests[0].prompt == [{"role": "user", "content": PROMPT}]


async def test_text_is_streamed_and_choices_are_listed() -> None:
    async with served() as (_, address):
        one = await run("--server", address, "--seed", "5", "--max-tokens", "4")
        assert one.output == TEXT[:4] + "\n"
        two = await run("--server", address, "--seed", "5", "--max-tokens", "4", "--n", "2")
        assert [line[:4] for line in two.output.splitlines()] == ["[0] ", "[1] "]
        assert two.output.splitlines()[0] == f"[0] {TEXT[:4]}"


async def test_json_has_all_choices() -> None:
    async with served() as (_, address):
        done = await run(
            "--server",
            address,
            "--seed",
            "5",
            "--max-tokens",
            "4",
            "--n",
            "2",
            "--json",
            "--top-logprobs",
            "1",
            "--prompt-logprobs",
            "2",
        )
    answer = json.loads(done.output)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] == TEXT[:4]
    for choice in answer["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]) == choice["usage"]["completion_tokens"] == 4
        assert [len(entry["top_ids"]) for entry in choice["prompt_logprobs"]] == [2] * (len(PROMPT) - 1)
        assert choice["finish_reason"] == "length"
        assert choice["nodes"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert answer["choices"][0]["seed"] == 5 != answer["choices"][1]["seed"]
    assert (answer["model"], len(answer["request_id"]) > 4) == ("tiny", True)


async def test_what_the_answer_must_be(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "grammar.lark").write_text('start: "é"\n', encoding="utf-8")
    given: dict[tuple[str, ...], tuple[str, Any]] = {
        ("--json-schema", str(tmp_path / "schema.json")): ('{"b": 1}', {"response_format": schema}),
        ("--grammar", str(tmp_path / "grammar.lark")): ("é", {"grammar": 'start: "é"\n'}),
        ("--json-object",): ("{}", {"response_format": "json_object"}),
        ("--regex", "[ab]+"): ("ab", {"regex": "[ab]+"}),
        ("--choice", "yes", "--choice", "no"): ("no", {"choice": ["yes", "no"]}),
    }
    with FakeServer(*(text for text, _ in given.values())) as server:
        for arguments, (text, options) in given.items():
            done = await run("--server", server.address, *arguments)
            assert done.output == text + "\n"
            assert server.requests[-1].options == options | {"max_tokens": 128}


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--json-schema", "nowhere.json"), "No such file"),
        (("--json-schema", "list.json"), "wants a JSON object"),
        (("--json-schema", "broken.json"), "is not JSON"),
        (("--grammar", "bytes.lark"), "can't decode"),
        (("--regex", "a", "--choice", "b"), "one of"),
        (("--json-object", "--json-schema", "object.json"), "one of"),
        (("--tools", "object.json"), "wants a JSON list"),
        (("--tools", "list.json"), "a tool is"),
        (("--template-values", "[]"), "wants a JSON object"),
        (("--tool-choice", "\udcff"), "surrogates not allowed"),
        (("--top-k", str(2**40)), "out of range"),
        (("--seed", "-1"), "out of range"),
        (("--logit-bias", "5"), "wants TOKEN_ID=BIAS"),
        (("--logit-bias", "x=1"), "wants TOKEN_ID=BIAS"),
    ],
)
async def test_what_no_request_holds(wrong: tuple[str, ...], why: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('["a"]')
    (tmp_path / "object.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bytes.lark").write_bytes(b"\xff")
    files = (".json", ".lark")
    done = await run(
        "--server", "127.0.0.1:1", *(str(tmp_path / word) if word.endswith(files) else word for word in wrong)
    )
    said = re.sub(r"[│\s]+", " ", done.output)
    assert (done.exit_code, why in said, wrong[0] in said) == (2, True, True), said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--top-p", "7"), "--top-p: must be above 0"),
        (("--tree", "bush"), "--tree: must be one of"),
        (("--tool-choice", "required"), "--tool-choice: required needs"),
        (("--priority", "11"), "--priority: "),
    ],
)
async def test_what_a_router_refuses_is_named_by_its_flag(wrong: tuple[str, ...], said: str) -> None:
    async with served() as (_, address):
        done = await run("--server", address, *wrong)
    assert (done.exit_code, str(done.exception)[: len(said)]) == (1, said)


async def test_a_system_message_and_another_router() -> None:
    async with served() as (nodes, address):
        done = await run("--server", "127.0.0.1:1", "--server", address, "--system", "Be brief.", "--max-tokens", "2")
        assert done.exit_code == 0, done.output
        (sequence,) = nodes.nodes["decode-0"].sequences
    prompt = bytes(sequence.prompt_token_ids).decode()
    assert prompt.index("Be brief.") < prompt.index(PROMPT)


async def test_a_format_that_a_router_refuses_is_named_by_its_flag() -> None:
    refusals = InvalidRequest("grammar", "allows no text"), InvalidRequest("messages", "are nested too deeply")
    with FakeServer(*refusals) as server:
        for said in ("--regex: allows no text", str(refusals[1])):
            done = await run("--server", server.address, "--regex", "[]")
            assert (done.exit_code, str(done.exception)) == (1, said)
