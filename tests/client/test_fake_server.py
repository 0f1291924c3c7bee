"""The fake server for users' tests: what it says is what a deployment could say, and it says what it was asked."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import time
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from cluster.frontdoor.service import serve_grpc
from paceline.client import (
    AsyncClient,
    Chunk,
    Client,
    DeadlineExceeded,
    FinishReason,
    Generation,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    Overloaded,
    PacelineError,
    ToolCall,
    choices_of,
    testing,
)
from paceline.client.testing import Answer, Asked, FakeServer
from paceline.request import derive_seed
from tests.support.shell_blocks import ROOT
from tests.support.tiny_routers import tiny_routers

CALLS = (ToolCall("c1", "weather", '{"city": "Zürich"}'), ToolCall("c2", "weather", "{}"))
WEATHER = {"type": "function", "function": {"name": "weather"}}
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS: dict[str, Any] = {
    "max_tokens": 99,
    "temperature": 0.0,
    "stop": ["zzz"],
    "logit_bias": {5: -1.5},
    "seed": 5,
    "top_logprobs": 2,
    "num_draft_tokens": 0,
    "model": "fake",
    "tenant": "team",
    "regex": ".*",
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}],
    "tool_choice": "weather",
    "parallel_tool_calls": False,
    "template_values": {"a": 1},
}


def test_it_says_what_it_was_asked() -> None:
    with FakeServer("a", "b", "c") as server, Client(server.address) as client:
        client.generate(HELLO, **OPTIONS)
        list(client.stream("hi", n=1))
        client.generate([1, 2])
        assert server.requests == [
            Asked(HELLO, OPTIONS),
            Asked("hi", {"n": 1}, streamed=True),
            Asked([1, 2]),
        ]


def test_texts_errors_and_functions_in_their_order() -> None:
    def echo(asked: Asked) -> str:
        return f"you said {asked.prompt}"

    with FakeServer("Hi", Overloaded("full", 2.5), echo) as server, Client(server.address) as client:
        assert client.generate("x").text == "Hi"
        with pytest.raises(Overloaded, match="full") as caught:
            client.generate("x")
        assert caught.value.retry_after_s == 2.5
        assert client.generate("me").text == "you said me"
        with pytest.raises(PacelineError, match="no answer for request 4"):
            client.generate("x")
        server.add("more")
        assert client.generate("x").text == "more"


def test_a_stream_is_the_answer() -> None:
    answer = Answer("Grüße!", "hm, ö", CALLS, tokens_per_chunk=3)
    with FakeServer(answer, answer) as server, Client(server.address) as client:
        whole = client.chat(HELLO, tools=[WEATHER], seed=5, n=2)
        streamed = choices_of(client.stream(HELLO, tools=[WEATHER], seed=5, n=2))
    for one, other in zip(whole.choices, streamed, strict=True):
        assert (one.text, one.reasoning, one.tool_calls) == ("Grüße!", "hm, ö", CALLS)
        assert (one.text, one.reasoning, one.tool_calls, one.token_ids) == (
            *(other.text, other.reasoning, other.tool_calls, other.token_ids),
        )
    assert [choice.completion.seed for choice in whole.choices] == [5, derive_seed(5, 1)]
    assert whole.completion.usage.completion_tokens == len(whole.token_ids)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("upto", [1, 5, 9, 20, 40])
async def test_a_stream_that_breaks_goes_on_without_loss(upto: int, blocking: bool) -> None:
    answer = Answer("Grüße!", "hm", CALLS, breaks_after=upto)
    with FakeServer(answer) as server:
        if blocking:
            with Client(server.address) as client:
                chunks = await asyncio.to_thread(lambda: list(client.stream(HELLO, tools=[WEATHER], regex=".*")))
        else:
            async with AsyncClient(server.address) as other:
                chunks = [chunk async for chunk in other.stream(HELLO, tools=[WEATHER], regex=".*")]
        (choice,) = choices_of(chunks)
        assert (choice.text, choice.reasoning, choice.tool_calls) == ("Grüße!", "hm", CALLS)
        first, again = server.requests
        assert again == Asked(first.prompt, dict(first.options) | {"seed": 7}, True, {0: upto})


def test_only_the_server_that_broke_knows_the_rest() -> None:
    late, early = Answer("Hello", breaks_after=2), Answer("Hello", breaks_after=0)
    with FakeServer(late) as server, FakeServer("Hi") as other, Client([server.address, other.address]) as client:
        with pytest.raises(NodeUnavailable, match="cannot be resumed"):
            list(client.stream("x"))
        assert (server.requests[0].resumed_at, other.requests[0].resumed_at) == (None, {0: 2})
    with FakeServer(early, early) as server, FakeServer("Hi") as other:
        with Client(server.address) as client, pytest.raises(NodeUnavailable, match="as the script says"):
            list(client.stream("x"))  # before the first chunk each router is asked once
        with Client([server.address, other.address]) as client:
            assert "".join(chunk.text for chunk in client.stream("x")) == "Hi"


def test_an_error_in_mid_stream_is_there_at_every_try() -> None:
    answer = Answer("Hello", breaks_after=2, error=DeadlineExceeded("too slow"))
    with FakeServer(answer) as server, Client(server.address) as client:
        stream = client.stream("x")
        assert next(stream).text + next(stream).text == "He"
        with pytest.raises(DeadlineExceeded, match="too slow"):
            next(stream)


def test_delays_and_leaving() -> None:
    slow = Answer("Hello", delay_s=0.2, pause_s=30.0)
    with FakeServer(slow, slow, "Hi") as server, Client(server.address) as client:
        began = time.monotonic()
        with client.stream("x") as stream:
            assert next(stream).text == "H"
            assert time.monotonic() - began >= 0.2
        with pytest.raises(DeadlineExceeded):
            client.generate("x", timeout=0.3)
        assert client.generate("x").text == "Hi"
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("answer", "options", "words"),
    [
        (Answer(tool_calls=CALLS), {}, "does not let the model call"),
        (Answer(tool_calls=CALLS), {"tools": [WEATHER], "tool_choice": "none"}, "does not let the model call"),
        ("maybe", {"choice": ["yes", "no"]}, "the request allows"),
        ("Hi", {"response_format": "json_object"}, "asks for JSON"),
        ("[]", {"response_format": {"type": "object"}}, "a JSON object"),
    ],
)
def test_a_script_that_no_deployment_would_follow(answer: Any, options: dict[str, Any], words: str) -> None:
    with FakeServer(answer) as server, Client(server.address) as client, pytest.raises(PacelineError, match=words):
        client.chat(HELLO, **options)


# What a test of a user may see of the fake it sees of a deployment.


def shape(value: Any) -> Any:
    """The kinds of a result and of the results that it holds; numbers and texts are left out."""
    if is_dataclass(value):
        return type(value), {one.name: shape(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, tuple):
        return {str(shape(item)) for item in value if is_dataclass(item)}
    return type(value)


BAD: list[tuple[Any, dict[str, Any]]] = [
    ("", {}),
    ([], {}),
    ("hello", {"model": "other"}),
    ("hello", {"temperature": -1.0}),
    ("hello", {"n": 129}),
    ("hello", {"stop": [""]}),
    ("hello", {"logit_bias": {5: 500.0}}),
    ("hello", {"min_tokens": 9, "max_tokens": 3}),
]


async def seen(address: str) -> list[Any]:
    """What the SDK sees of a server, request by request, without what a text is."""
    found: list[Any] = []
    async with AsyncClient(address, timeout=60) as client:
        done: Generation = await client.generate("hello", max_tokens=9, seed=5, top_logprobs=2, n=2, ignore_eos=True)
        found += [shape(done), [len(choice.token_ids) for choice in done.choices], done.completion.finish_reason]
        found += [[len(entry.top_ids) for entry in done.choices[0].logprobs], [c.completion.seed for c in done.choices]]
        chunks: list[Chunk] = [
            c async for c in client.stream([1, 2], max_tokens=9, seed=5, request_id="mine", ignore_eos=True)
        ]
        found += [(len(chunks[0].token_ids), chunks[0].round is None), all(c.round is not None for c in chunks[1:-1])]
        found += [chunks[-1].token_ids, chunks[-1].completion and chunks[-1].completion.request_id]
        found += [sum(len(chunk.token_ids) for chunk in chunks), all(c.completion is None for c in chunks[:-1])]
        found += [str(shape(await client.model_info())), shape(await client.tokenize("hello"))]
        for prompt, options in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await client.generate(prompt, **{"ignore_eos": True, **options})
            found.append(caught.value.field)
        with pytest.raises(NotFound):
            await client.trace("unknown")
    return found


async def test_it_is_like_a_deployment() -> None:
    async with tiny_routers("ngram") as make:
        server = await serve_grpc(router := make(journal=None), "127.0.0.1:0")
        real = await seen(f"127.0.0.1:{server.port}")
        await server.stop(0)
        await router.close()
    with FakeServer(*["Hello, world"] * 3, model="tiny") as fake:
        assert await seen(fake.address) == real
    assert real[2] is FinishReason.LENGTH


def test_the_example_and_the_page() -> None:
    command = [sys.executable, str(ROOT / "examples/testing_your_program.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.count("passed")) == (0, 3), done.stderr
    page = (ROOT / "docs/guides/testing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(block, {})
    assert textwrap.indent(block, "    ") in (testing.__doc__ or "")
