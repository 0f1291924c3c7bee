"""The official OpenAI client speaks the Responses API to the real server: answers, streams, errors, what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from cluster.contract.generation import Chat, ChatMessage, Tool, ToolChoice
from cluster.frontdoor.http import create_app, serve_http
from cluster.frontdoor.responses import service
from cluster.routing.metrics import Metrics
from paceline.errors import NodeUnavailable, Overloaded
from paceline.request import FinishReason, GrammarKind
from paceline.results import Chunk, Completion, Usage
from tests.support.chunk_router import ChunkRouter, call, text, thought
from tests.support.fake_router import MODEL

PROMPT_S = 5.0  # longest wait for what happens at once
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
CHUNKS = [
    thought("Let me "),
    thought("see."),
    text("It is"),
    text(" fine."),
    call(0, "", "call_a", "weather"),
    call(0, '{"city": '),
    call(0, '"Rome"}'),
    call(1, '{"city": "Oslo"}', "call_b", "weather"),
]
CALLED = Completion(FinishReason.TOOL_CALLS, Usage(5, 9, 2, 4), seed=77)


@pytest.fixture
def router() -> ChunkRouter:
    made = ChunkRouter()
    made.chunks = [text("Hello"), text(" you")]
    return made


@pytest.fixture
async def client(router: ChunkRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as made:
        yield made
    await server.stop(0.0)


def shown(response: Response) -> list[dict[str, Any]]:
    """The output without its ids, which are random."""
    return [item.model_dump(exclude={"id"}, exclude_none=True) for item in response.output]


def asked_chat(router: ChunkRouter) -> Chat:
    prompt = router.asked[-1].prompt
    assert isinstance(prompt, Chat)
    return prompt


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_response(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    answer = await client.responses.create(
        model=MODEL, input="hi", instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=7,
        metadata={"a": "b"}, user="me", extra_body={"seed": 3, "priority": 2, "cache_salt": "t"},
    )  # fmt: skip
    assert answer.output_text == "Hello you"
    assert (answer.status, answer.model, answer.metadata) == ("completed", MODEL, {"a": "b"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (5, 9, 14)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    asked = router.asked[0]
    assert asked_chat(router).messages == (ChatMessage("system", "Be brief."), ChatMessage("user", "hi"))
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.seed) == (0.5, 0.9, 3)
    assert (asked.max_tokens, asked.priority, asked.tenant) == (7, 2, "t")
    assert asked.request_id == answer.id == answer._request_id
    assert answer.model_extra is not None
    assert answer.model_extra["paceline"]["seed"] == 77


async def test_sampling_fields_are_those_of_completions(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    """Mutants: a field is dropped on its way to the router, or the penalties are not told back."""
    sampling = {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    more = {**sampling, **penalties, "stop": "x", "logit_bias": {"5": 1.5}, "stop_token_ids": [7]}
    answer = (await client.responses.create(model=MODEL, input="hi", extra_body=more)).to_dict()
    asked = router.asked[0].sampling
    assert {name: getattr(asked, name) for name in sampling | penalties} == sampling | penalties
    assert (asked.stop, asked.logit_bias, asked.stop_token_ids, asked.n) == (("x",), {5: 1.5}, (7,), 1)
    assert {name: answer[name] for name in penalties} == penalties
    plain = (await client.responses.create(model=MODEL, input="hi")).to_dict()
    assert {plain[name] for name in penalties} == {0.0}


async def test_thought_text_and_calls(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS, CALLED
    answer = await client.responses.create(model=MODEL, input="hi", tools=[TOOL], parallel_tool_calls=True)
    assert shown(answer) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Let me see."}],
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is fine.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "call_id": "call_a",
            "name": "weather",
            "arguments": '{"city": "Rome"}',
        },
        {
            "type": "function_call",
            "status": "completed",
            "call_id": "call_b",
            "name": "weather",
            "arguments": '{"city": "Oslo"}',
        },
    ]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 4
    parameters = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}'
    assert asked_chat(router).tools == (Tool("weather", "Of a city.", parameters, True),)


PART = ["content_part.done", "output_item.done"]
ARGUMENTS = ["function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
EVENTS = [
    *("created", "in_progress"),
    *("output_item.added", "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done", *PART),
    *("output_item.added", "content_part.added", *["output_text.delta"] * 2, "output_text.done", *PART),
    *("output_item.added", ARGUMENTS[0], *ARGUMENTS),
    *("output_item.added", *ARGUMENTS),
    "completed",
]


async def test_events_put_together_are_the_response(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS, CALLED
    whole = await client.responses.create(model=MODEL, input="hi", tools=[TOOL])
    stream = await client.responses.create(model=MODEL, input="hi", tools=[TOOL], stream=True)
    items: dict[int, dict[str, Any]] = {}
    events: list[Any] = [event async for event in stream]
    assert [event.type.removeprefix("response.") for event in events] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items[event.output_index] = event.item.model_dump(exclude={"id"}, exclude_none=True)
            case "response.content_part.added":
                items[event.output_index]["content"].append(event.part.model_dump())
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[event.output_index]["content"][event.content_index]["text"] += event.delta
            case "response.function_call_arguments.delta":
                items[event.output_index]["arguments"] += event.delta
            case "response.function_call_arguments.done":
                assert event.arguments == items[event.output_index]["arguments"]
            case "response.output_item.done":
                items[event.output_index]["status"] = "completed"
                assert event.item.model_dump(exclude={"id"}, exclude_none=True) == items[event.output_index]
    assert list(items.values()) == shown(whole)
    assert events[-1].type == "response.completed"
    assert shown(events[-1].response) == shown(whole)


async def test_the_clients_own_stream_helper(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS, CALLED
    async with client.responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    assert final.output_text == "It is fine."
    (first, _) = [item for item in final.output if item.type == "function_call"]
    assert first.parsed_arguments == {"city": "Rome"}


async def test_a_form_is_parsed_by_the_client(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    class City(BaseModel):
        name: str

    router.chunks = [text('{"name": "Rome"}')]
    answer = await client.responses.parse(model=MODEL, input="hi", text_format=City)
    assert answer.output_parsed == City(name="Rome")
    grammar = router.asked[0].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, '"name"' in grammar.source) == (GrammarKind.JSON_SCHEMA, True)


async def test_limits_say_incomplete(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS[:6], Completion(FinishReason.LENGTH, Usage(5, 9))
    answer = await client.responses.create(model=MODEL, input="hi")
    assert answer.status == "incomplete"
    assert [item["status"] for item in shown(answer)] == ["completed", "completed", "incomplete"]
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


async def test_no_word_is_an_empty_message(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks = []
    answer = await client.responses.create(model=MODEL, input="hi")
    assert (answer.output_text, [item["type"] for item in shown(answer)]) == ("", ["message"])


# -- conversations ---------------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.chunks, router.completion = CHUNKS, CALLED
    first = await client.responses.create(model=MODEL, input="Weather?", instructions="Old.", tools=[TOOL])
    outputs: Any = [
        {"type": "function_call_output", "call_id": "call_a", "output": "sun"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "rain"}]},
    ]
    second = await client.responses.create(
        model=MODEL, input=outputs, instructions="New.", previous_response_id=first.id
    )
    turns = asked_chat(router).messages
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool", "tool"]
    assert turns[0].content == "New."
    assert (turns[2].content, turns[2].reasoning) == ("It is fine.", "Let me see.")
    assert [(made.id, made.arguments) for made in turns[2].tool_calls] == [
        ("call_a", '{"city": "Rome"}'),
        ("call_b", '{"city": "Oslo"}'),
    ]
    assert [(turn.tool_call_id, turn.name, turn.content) for turn in turns[3:]] == [
        ("call_a", "weather", "sun"),
        ("call_b", "weather", "rain"),
    ]
    await client.responses.create(model=MODEL, input="Thanks.", previous_response_id=second.id)
    assert [turn.role for turn in asked_chat(router).messages] == [
        *("user", "assistant", "tool", "tool", "assistant", "user")
    ]
    # Items that come back as they went out are the same turns.
    sent: Any = [{"role": "user", "content": "Weather?"}, *[item.model_dump() for item in first.output], *outputs]
    await client.responses.create(model=MODEL, input=sent, store=False)
    assert asked_chat(router).messages == turns[1:]


async def test_what_is_kept(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="hi")
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    items = [item async for item in client.responses.input_items.list(made.id)]
    contents: list[Any] = [item.to_dict()["content"] for item in items]
    assert contents == [[{"type": "input_text", "text": "hi"}]]
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        await client.responses.cancel(made.id)
    await client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    unkept = await client.responses.create(model=MODEL, input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model=MODEL, input="hi", previous_response_id=unkept.id)
    assert caught.value.code == "previous_response_not_found"


async def test_another_tenant_finds_nothing(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="hi", extra_body={"cache_salt": "mine"})
    for query in ({}, {"cache_salt": "other"}):
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id, extra_query=query)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model=MODEL, input="hi", previous_response_id=made.id, extra_body=dict(query))
    assert (await client.responses.retrieve(made.id, extra_query={"cache_salt": "mine"})).id == made.id


async def test_pages_of_input_items(client: openai.AsyncOpenAI) -> None:
    turns: Any = [{"role": "user", "content": str(i)} for i in range(45)]
    made = await client.responses.create(model=MODEL, input=turns)
    newest: list[Any] = [item.to_dict()["content"] async for item in client.responses.input_items.list(made.id)]
    assert [content[0]["text"] for content in newest] == [str(i) for i in reversed(range(45))]
    page = await client.responses.input_items.list(made.id, order="asc", limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    for wrong in ({"limit": 101}, {"limit": 0}, {"after": "x"}, {"extra_query": {"order": "x"}}):
        with pytest.raises(openai.BadRequestError):
            await client.responses.input_items.list(made.id, **wrong)


# -- ends before the end ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling(client: openai.AsyncOpenAI, router: ChunkRouter, stream: bool) -> None:
    router.stall_after = 1
    asking: asyncio.Task[Any] = asyncio.create_task(client.responses.create(model=MODEL, input="hi", stream=stream))
    await asyncio.wait_for(router.started.wait(), PROMPT_S)
    response_id = router.asked[0].request_id
    async with asyncio.timeout(PROMPT_S):
        while (await client.responses.retrieve(response_id)).output_text != "Hello":
            await asyncio.sleep(0.01)
    assert (await client.responses.cancel(response_id)).status == "cancelled"
    await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    assert router.finished == 0
    answer = [event async for event in await asking][-1].response if stream else await asking
    assert (answer.status, answer.output_text, answer.output[0].status) == ("cancelled", "Hello", "incomplete")
    assert (await client.responses.cancel(response_id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        await client.responses.create(model=MODEL, input="hi", previous_response_id=response_id)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_frees_the_nodes_and_keeps_nothing(
    client: openai.AsyncOpenAI, router: ChunkRouter, stream: bool
) -> None:
    router.stall_after = 1
    asking = asyncio.create_task(client.responses.create(model=MODEL, input="hi", stream=stream))
    await asyncio.wait_for(router.started.wait(), PROMPT_S)
    if stream:
        await (await asking).close()
    else:
        asking.cancel()
    await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(router.asked[0].request_id)


async def test_a_failure_in_mid_stream_is_told(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.error, router.error_after = NodeUnavailable("decode-0 is gone"), 1
    events: list[Any] = [event async for event in await client.responses.create(model=MODEL, input="hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "decode-0 is gone")
    assert (await client.responses.retrieve(last.response.id)).status == "failed"
    with pytest.raises(openai.InternalServerError, match="decode-0 is gone"):
        await client.responses.create(model=MODEL, input="hi")


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"background": True}])
async def test_no_room_is_a_status(client: openai.AsyncOpenAI, router: ChunkRouter, more: dict[str, Any]) -> None:
    router.error = Overloaded("full", 7.0)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.responses.create(model=MODEL, input="hi", **more)
    assert caught.value.response.headers["retry-after"] == "7"


async def test_in_the_background(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.stall_after = 1
    begun = await client.responses.create(model=MODEL, input="hi", background=True)
    assert begun.status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError, match="in progress"):
        await client.responses.delete(begun.id)
    with pytest.raises(openai.BadRequestError, match="in_progress"):
        await client.responses.create(model=MODEL, input="hi", previous_response_id=begun.id)
    router.release.set()
    async with asyncio.timeout(PROMPT_S):
        while (done := await client.responses.retrieve(begun.id)).status != "completed":
            await asyncio.sleep(0.01)
    assert (done.output_text, done.background) == ("Hello you", True)


async def test_a_failure_in_the_background_is_kept(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    router.stall_after, router.error, router.error_after = 1, NodeUnavailable("gone"), 2
    begun = await client.responses.create(model=MODEL, input="hi", background=True)
    router.release.set()
    async with asyncio.timeout(PROMPT_S):
        while (done := await client.responses.retrieve(begun.id)).status != "failed":
            await asyncio.sleep(0.01)
    assert done.error is not None
    assert done.error.message == "gone"


async def test_a_late_refusal_in_the_background_is_kept(
    client: openai.AsyncOpenAI, router: ChunkRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits_in_the_queue(*_: Any) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0.3)
        raise Overloaded("full", 7.0)
        yield

    monkeypatch.setattr(service, "BACKGROUND_WAIT_S", 0.05)
    monkeypatch.setattr(router, "generate", waits_in_the_queue)
    begun = await client.responses.create(model=MODEL, input="hi", background=True)
    async with asyncio.timeout(PROMPT_S):
        while (done := await client.responses.retrieve(begun.id)).status != "failed":
            await asyncio.sleep(0.01)
    assert begun.status == "queued"
    assert done.error is not None
    assert done.error.code == "rate_limit_exceeded"


async def test_another_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="gpt", input="hi")
    assert caught.value.code == "model_not_found"


async def test_unknown_words_of_a_query(client: openai.AsyncOpenAI) -> None:
    made = await client.responses.create(model=MODEL, input="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.retrieve(made.id, extra_query={"stream": "true"})
    assert caught.value.param == "stream"


@pytest.mark.parametrize(
    ("asked", "choice", "name"),
    [
        ("none", ToolChoice.NONE, ""),
        ("auto", ToolChoice.AUTO, ""),
        ("required", ToolChoice.REQUIRED, ""),
        ({"type": "function", "name": "weather"}, ToolChoice.NAMED, "weather"),
    ],
)
async def test_choices_of_tools(
    client: openai.AsyncOpenAI, router: ChunkRouter, asked: Any, choice: ToolChoice, name: str
) -> None:
    await client.responses.create(
        model=MODEL, input="hi", tools=[TOOL], tool_choice=asked, parallel_tool_calls=name != ""
    )
    chat = asked_chat(router)
    assert (chat.tool_choice, chat.tool_name, chat.one_tool_call) == (choice, name, name == "")


async def test_a_chunk_of_everything_is_in_order(client: openai.AsyncOpenAI, router: ChunkRouter) -> None:
    """A round may bring a thought's end, text and a call at once."""
    one = Chunk(0, 0, text="b", reasoning="a", tool_calls=CHUNKS[-1].tool_calls)
    router.chunks = [one]
    answer = await client.responses.create(model=MODEL, input="hi")
    assert [item["type"] for item in shown(answer)] == ["reasoning", "message", "function_call"]
