"""The official Anthropic client against the real server: answers, streams, errors, tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageParam
from pydantic import BaseModel

from cluster.contract.generation import Chat, ChatMessage, Tool, ToolChoice
from cluster.frontdoor.http import create_app, serve_http
from cluster.routing.metrics import Metrics
from paceline.errors import InvalidRequest, NodeUnavailable, Overloaded
from paceline.request import FinishReason, GrammarKind
from paceline.results import Completion, ToolCall, Usage
from tests.support.chunk_router import ChunkRouter, call, text, thought
from tests.support.fake_router import MODEL, PROMPT_IDS

PROMPT_S = 5.0  # longest wait for what happens at once
HI: list[MessageParam] = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
CHUNKS = [
    *(thought("Let me "), thought("see."), text("It is"), text(" fine.")),
    *(call(0, "", "call_a", "weather"), call(0, '{"city": '), call(0, '"Rome"}')),
    *(call(1, "{}", "call_b", "weather"), call(2, "", "call_c", "now")),
]
SUN: Any = {"type": "text", "text": "sun"}
CALLED = Completion(FinishReason.TOOL_CALLS, Usage(5, 9, 2), seed=77)


@pytest.fixture
def router() -> ChunkRouter:
    made = ChunkRouter()
    made.chunks = [text("Hello"), text(" you")]
    return made


@pytest.fixture
async def url(router: ChunkRouter) -> AsyncIterator[str]:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop(0.0)


@pytest.fixture
async def client(url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made


def shown(message: Message) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_none=True) for block in message.content]


def asked_chat(router: ChunkRouter) -> Chat:
    prompt = router.asked[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_message(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 4}
    answer = await client.messages.create(
        model=MODEL, max_tokens=7, messages=HI, system="Be brief.", stop_sequences=["x"], metadata={"user_id": "me"},
        extra_body=sampling,
    )  # fmt: skip
    assert shown(answer) == [{"type": "text", "text": "Hello you"}]
    assert (answer.role, answer.model, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 9)
    assert answer._request_id == answer.id == router.asked[0].request_id
    assert asked_chat(router).messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))
    asked = router.asked[0].sampling
    assert (asked.temperature, asked.top_p, asked.top_k, asked.seed, asked.stop) == (0.5, 0.9, 3, 4, ("x",))
    assert router.asked[0].max_tokens == 7


async def test_events_put_together_are_the_message(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS, CALLED
    whole = await client.messages.create(model=MODEL, max_tokens=20, messages=HI, tools=[TOOL])
    assert shown(whole) == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "It is fine."},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_b", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_c", "name": "now", "input": {}},
    ]
    assert whole.stop_reason == "tool_use"
    async with client.messages.stream(model=MODEL, max_tokens=20, messages=HI, tools=[TOOL]) as stream:
        final = await stream.get_final_message()
    assert shown(final) == shown(whole)
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


async def test_the_order_of_events(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    """A block is closed before the next one begins; the first event has the prompt's tokens."""
    router.chunks, router.completion = CHUNKS, CALLED
    events: list[Any] = [event async for event in await client.messages.create(
        model=MODEL, max_tokens=20, messages=HI, tools=[TOOL], stream=True
    )]  # fmt: skip
    first = events[0]
    assert first.type == "message_start"
    assert (first.message.usage.input_tokens, first.message.content) == (len(PROMPT_IDS), [])
    blocks: list[tuple[str, int]] = [
        (event.type, event.index) for event in events if event.type.startswith("content_block")
    ]
    deltas = {0: 2, 1: 2, 2: 2, 3: 1, 4: 0}
    expected = []
    for index, count in deltas.items():
        expected += [("content_block_start", index), *[("content_block_delta", index)] * count]
        expected += [("content_block_stop", index)]
    assert blocks == expected
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]


async def test_a_ping_and_names_of_events(url: str) -> None:
    async with httpx.AsyncClient() as plain:
        body = {"max_tokens": 5, "messages": HI, "stream": True}
        reply = await plain.post(f"{url}/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    blocks = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    assert [lines[0] for lines in blocks][:3] == ["event: message_start", "event: ping", "event: content_block_start"]
    assert all(f'"type":"{lines[0].removeprefix("event: ")}"' in lines[1] for lines in blocks)


@pytest.mark.parametrize(
    ("completion", "reason", "sequence"),
    [
        (Completion(FinishReason.STOP, Usage(5, 9)), "end_turn", None),
        (Completion(FinishReason.STOP, Usage(5, 9), stop_string="\n\n"), "stop_sequence", "\n\n"),
        (Completion(FinishReason.LENGTH, Usage(5, 20)), "max_tokens", None),
        (Completion(FinishReason.LENGTH, Usage(5, 19)), "model_context_window_exceeded", None),
        (Completion(FinishReason.TOOL_CALLS, Usage(5, 9)), "tool_use", None),
    ],
)
async def test_why_it_ended(
    client: anthropic.AsyncAnthropic, router: ChunkRouter, completion: Completion, reason: str, sequence: str | None
) -> None:
    router.completion = completion
    whole = await client.messages.create(model=MODEL, max_tokens=20, messages=HI)
    async with client.messages.stream(model=MODEL, max_tokens=20, messages=HI) as stream:
        final = await stream.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == (final.stop_reason, final.stop_sequence) == (reason, sequence)


async def test_a_call_that_was_cut(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    """Streamed or not, what is whole of its arguments is told."""
    router.chunks = [call(0, '{"city": "Rome", "days": [1, 2', "call_a", "weather")]
    router.completion = Completion(FinishReason.LENGTH, Usage(5, 20))
    whole = await client.messages.create(model=MODEL, max_tokens=20, messages=HI, tools=[TOOL])
    async with client.messages.stream(model=MODEL, max_tokens=20, messages=HI, tools=[TOOL]) as stream:
        final = await stream.get_final_message()
    assert shown(whole) == shown(final)
    assert shown(whole)[0]["input"]["city"] == "Rome"


async def test_a_form_is_parsed_by_the_client(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    class City(BaseModel):
        name: str

    router.chunks = [text('{"name": "Rome"}')]
    answer = await client.messages.parse(model=MODEL, max_tokens=20, messages=HI, output_format=City)
    assert answer.parsed_output == City(name="Rome")
    grammar = router.asked[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, '"name"' in grammar.source) == (GrammarKind.JSON_SCHEMA, True)


async def test_counting(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="S", tools=[TOOL])
    assert counted.input_tokens == len((await router.tokenize(router.tokenized.pop())).token_ids)
    await client.messages.create(model=MODEL, max_tokens=5, messages=HI, system="S", tools=[TOOL])
    assert router.tokenized == [asked_chat(router)]  # what is counted is what is asked
    assert len(router.asked) == 1


# -- conversations ---------------------------------------------------------------------------------------------------


async def test_turns_with_tools(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    turns: list[MessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Zürich"}},
                {"type": "tool_use", "id": "b", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "b", "content": "noon"},
                {"type": "tool_result", "tool_use_id": "a", "content": [SUN], "is_error": True},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]  # fmt: skip
    await client.messages.create(
        model=MODEL, max_tokens=5, messages=turns, tools=[TOOL],
        system=[{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "T"}],
    )  # fmt: skip
    chat = asked_chat(router)
    assert chat.messages == (
        ChatMessage("system", "ST"),
        ChatMessage("user", "Weather?"),
        ChatMessage(
            "assistant",
            "I ask.",
            (ToolCall("a", "weather", '{"city": "Zürich"}'), ToolCall("b", "now", "{}")),
            reasoning="Hm.",
        ),
        ChatMessage("tool", "noon", tool_call_id="b", name="now"),
        ChatMessage("tool", "sun", tool_call_id="a", name="weather"),
        ChatMessage("user", "Well?"),
    )
    parameters = '{"type": "object", "properties": {"city": {"type": "string"}}}'
    assert chat.tools == (Tool("weather", "Of a city.", parameters, True),)
    assert not chat.continue_final_message


async def test_an_answer_that_is_begun(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    await client.messages.create(
        model=MODEL, max_tokens=5, messages=[*HI, {"role": "assistant", "content": "The answer is"}]
    )
    assert asked_chat(router).continue_final_message
    assert asked_chat(router).messages[-1] == ChatMessage("assistant", "The answer is")


@pytest.mark.parametrize(
    ("asked", "choice", "name"),
    [
        ({"type": "none"}, ToolChoice.NONE, ""),
        ({"type": "auto"}, ToolChoice.AUTO, ""),
        ({"type": "any"}, ToolChoice.REQUIRED, ""),
        ({"type": "tool", "name": "weather", "disable_parallel_tool_use": True}, ToolChoice.NAMED, "weather"),
    ],
)
async def test_choices_of_tools(
    client: anthropic.AsyncAnthropic, router: ChunkRouter, asked: Any, choice: ToolChoice, name: str
) -> None:
    await client.messages.create(model=MODEL, max_tokens=5, messages=HI, tools=[TOOL], tool_choice=asked)
    chat = asked_chat(router)
    assert (chat.tool_choice, chat.tool_name, chat.one_tool_call) == (choice, name, name != "")


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_no_room(client: anthropic.AsyncAnthropic, router: ChunkRouter, stream: bool) -> None:
    router.error = Overloaded("full", 7.0)
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(model=MODEL, max_tokens=5, messages=HI, stream=stream)
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.type == "rate_limit_error"


async def test_a_failure_in_mid_stream(client: anthropic.AsyncAnthropic, router: ChunkRouter) -> None:
    router.error, router.error_after = NodeUnavailable("decode-0 is gone"), 1
    stream = aiter(await client.messages.create(model=MODEL, max_tokens=5, messages=HI, stream=True))
    assert [(await anext(stream)).type for _ in range(3)] == [
        *("message_start", "content_block_start", "content_block_delta")
    ]
    with pytest.raises(anthropic.APIStatusError, match="decode-0 is gone") as caught:
        await anext(stream)
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "decode-0 is gone"},
    }


async def test_the_routers_own_words_name_the_bodys_fields(
    client: anthropic.AsyncAnthropic, router: ChunkRouter
) -> None:
    router.error = InvalidRequest("stop", "is wrong")
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences: is wrong"):
        await client.messages.create(model=MODEL, max_tokens=5, messages=HI)


async def test_another_model(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        await client.messages.create(model="claude", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.count_tokens(model="claude", messages=HI)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_the_nodes(client: anthropic.AsyncAnthropic, router: ChunkRouter, stream: bool) -> None:
    router.stall_after = 1
    asking: asyncio.Task[Any] = asyncio.create_task(
        client.messages.create(model=MODEL, max_tokens=5, messages=HI, stream=stream)
    )
    await asyncio.wait_for(router.started.wait(), PROMPT_S)
    if stream:
        await (await asking).close()
    else:
        asking.cancel()
    await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    assert router.finished == 0
