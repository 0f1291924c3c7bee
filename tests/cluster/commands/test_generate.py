"""``paceline generate`` has every option of the SDK, and what it is given arrives."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.commands.generate import NOT_FLAGS, PANELS, generate
from cluster.frontdoor.service import serve_grpc
from paceline.client import AsyncClient, Client, GenerateOptions
from paceline.client.testing import FakeServer
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
    if value is True:
        return [flag]
    values = [f"{key}={item}" for key, item in value.items()] if isinstance(value, dict) else value
    return [part for item in (values if isinstance(values, list) else [value]) for part in (flag, str(item))]


def test_it_has_every_option_of_the_sdk() -> None:
    options = inspect.signature(generate).parameters
    connection = inspect.signature(Client.__init__).parameters
    asked = {name for name, p in connection.items() if p.kind is p.KEYWORD_ONLY} - {"options", "api_key"}
    flags = GenerateOptions.__annotations__.keys() - NOT_FLAGS
    assert options.keys() == flags | asked | {
        *("prompt", "server", "tls", "tls_ca", "api_key_file", "chat", "system", "as_json", "json_schema", "grammar"),
    }
    assert {name: options[name].default for name in asked} == {name: connection[name].default for name in asked}
    assert inspect.signature(AsyncClient.__init__).parameters.keys() == connection.keys()
    assert GIVEN.keys() == flags - {"regex", "choice"}  # one format at a time: below


def test_the_help_has_each_option_below_one_heading() -> None:
    placed = [name for names in PANELS.values() for name in names]
    assert len(placed) == len(set(placed))
    assert set(placed) == inspect.signature(generate).parameters.keys() - {"prompt", "chat", "system", "as_json"}
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
        ("--regex", "[ab]+"): ("ab", {"regex": "[ab]+"}),
        ("--choice", "yes", "--choice", "no"): ("no", {"choice": ["yes", "no"]}),
    }
    with FakeServer(*(text for text, _ in given.values())) as server:
        for arguments, (text, options) in given.items():
            done = await run("--server", server.address, *arguments)
            assert done.output == text + "\n"
            assert server.requests[-1].options == options | {"max_tokens": 128}


@pytest.mark.parametrize(
    "wrong",
    [
        ("--json-schema", "nowhere.json"),
        ("--json-schema", "list.json"),
        ("--json-schema", "broken.json"),
        ("--grammar", "bytes.lark"),
        ("--regex", "a", "--choice", "b"),
    ],
)
async def test_formats_that_are_none(wrong: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "bytes.lark").write_bytes(b"\xff")
    done = await run("--server", "127.0.0.1:1", *(str(tmp_path / word) if "." in word else word for word in wrong))
    assert (done.exit_code, "Invalid value" in done.output) == (2, True)


async def test_a_system_message_and_another_router() -> None:
    async with served() as (nodes, address):
        done = await run("--server", "127.0.0.1:1", "--server", address, "--system", "Be brief.", "--max-tokens", "2")
        assert done.exit_code == 0, done.output
        (sequence,) = nodes.nodes["decode-0"].sequences
    prompt = bytes(sequence.prompt_token_ids).decode()
    assert prompt.index("Be brief.") < prompt.index(PROMPT)


@pytest.mark.parametrize("wrong", [("--top-k", str(2**40)), ("--logit-bias", "5"), ("--seed", "-1")])
async def test_values_that_no_field_holds(wrong: tuple[str, str]) -> None:
    done = await run("--server", "127.0.0.1:1", *wrong)
    assert done.exit_code == 2
    assert "Invalid value" in done.output
