"""The official clients of OpenAI's Responses API and of Anthropic's Messages API, unmodified, against real nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, MessageParam
from openai.resources.responses import AsyncResponses
from openai.types.responses import Response

from tests.support.tiny_http import CONTEXT, MODEL, Served, served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

QUESTION = "What does a pace line do?"
TURNS: list[MessageParam] = [{"role": "user", "content": QUESTION}]
WARM: dict[str, Any] = {"seed": 11}
SOON_S = 10.0


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path) as made:
        yield made


@pytest.fixture
async def responses(deployment: Served) -> AsyncIterator[AsyncResponses]:
    async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client.responses


@pytest.fixture
async def messages(deployment: Served) -> AsyncIterator[anthropic.resources.AsyncMessages]:
    async with anthropic.AsyncAnthropic(base_url=deployment.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client.messages


def said(response: Response) -> tuple[str | None, str, int]:
    assert response.usage is not None
    return response.status, response.output_text, response.usage.output_tokens


async def idle(deployment: Served) -> None:
    """Soon nothing is asked of the nodes any more, and they have every page back."""
    async with asyncio.timeout(SOON_S):
        while deployment.router.inflight:
            await asyncio.sleep(0.02)
    await deployment.nodes.all_released()


# -- responses -------------------------------------------------------------------------------------------------------


async def test_a_streamed_response_is_the_whole_one(responses: AsyncResponses) -> None:
    whole = await responses.create(model=MODEL, input=QUESTION, max_output_tokens=40, extra_body=WARM)
    async with responses.stream(model=MODEL, input=QUESTION, max_output_tokens=40, extra_body=WARM) as stream:
        events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text != ""
    assert said(events[-1].response) == said(whole)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"


async def test_a_conversation_goes_on_by_id(responses: AsyncResponses) -> None:
    """The answer is that of the whole conversation sent at once."""
    first = await responses.create(model=MODEL, input=QUESTION, max_output_tokens=20, extra_body=WARM)
    more: dict[str, Any] = {"model": MODEL, "max_output_tokens": 20, "temperature": 0}
    second = await responses.create(previous_response_id=first.id, input="And then?", **more)
    spelt = await responses.create(
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And then?"},
        ],
        **more,
    )
    assert said(second) == said(spelt)
    assert second.usage is not None
    assert spelt.usage is not None
    assert second.usage.input_tokens == spelt.usage.input_tokens > 0
    assert said(await responses.retrieve(second.id)) == said(second)


@pytest.mark.parametrize("way", ["cancel", "leave"])
async def test_a_stream_that_ends_early_frees_its_nodes(
    deployment: Served, responses: AsyncResponses, way: str
) -> None:
    deployment.router.stall_after = 3
    stream = await responses.create(model=MODEL, input="x", max_output_tokens=400, stream=True, extra_body=WARM)
    first: Any = await anext(aiter(stream))
    assert first.type == "response.created"
    if way == "leave":
        await stream.close()
        await idle(deployment)
        with pytest.raises(openai.NotFoundError):
            await responses.retrieve(first.response.id)
        return
    assert (await responses.retrieve(first.response.id)).status == "in_progress"
    assert (await responses.cancel(first.response.id)).status == "cancelled"
    await idle(deployment)
    last: Any = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    assert (await responses.retrieve(first.response.id)).status == "cancelled"


async def test_in_the_background(deployment: Served, responses: AsyncResponses) -> None:
    direct = await responses.create(model=MODEL, input=QUESTION, max_output_tokens=30, extra_body=WARM)
    begun = await responses.create(model=MODEL, input=QUESTION, max_output_tokens=30, background=True, extra_body=WARM)
    assert begun.status in ("queued", "in_progress", "incomplete")
    async with asyncio.timeout(SOON_S):
        while (done := await responses.retrieve(begun.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    assert said(done) == said(direct)
    await idle(deployment)


async def test_a_history_too_long_is_one_clear_error(
    deployment: Served, responses: AsyncResponses, messages: anthropic.resources.AsyncMessages
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT}") as caught:
        await responses.create(model=MODEL, input="x" * 2 * CONTEXT)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT}"):
        await responses.create(model=MODEL, input="x" * 2 * CONTEXT, background=True)
    with pytest.raises(anthropic.BadRequestError, match=f"maximum context length is {CONTEXT}"):
        await messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "x" * 2 * CONTEXT}])
    await idle(deployment)


# -- messages --------------------------------------------------------------------------------------------------------


def told(message: Message) -> tuple[list[str], str | None, str | None, int]:
    texts = [block.text for block in message.content if block.type == "text"]
    return texts, message.stop_reason, message.stop_sequence, message.usage.output_tokens


async def test_a_streamed_message_is_the_whole_one(messages: anthropic.resources.AsyncMessages) -> None:
    whole = await messages.create(model=MODEL, max_tokens=40, messages=TURNS, extra_body=WARM)
    async with messages.stream(model=MODEL, max_tokens=40, messages=TURNS, extra_body=WARM) as stream:
        texts = [text async for text in stream.text_stream]
        final = await stream.get_final_message()
    assert told(final) == told(whole)
    assert "".join(texts) == told(whole)[0][0] != ""
    assert whole.stop_reason == "max_tokens"


async def test_a_stop_sequence_is_told(messages: anthropic.resources.AsyncMessages) -> None:
    whole = await messages.create(model=MODEL, max_tokens=40, messages=TURNS, extra_body=WARM)
    text = told(whole)[0][0]
    stop = next(text[at : at + 2] for at in range(5, len(text)) if text[at : at + 2].isprintable())
    cut = await messages.create(
        model=MODEL, max_tokens=40, messages=TURNS, stop_sequences=["never seen", stop], extra_body=WARM
    )
    assert told(cut)[:3] == ([text[: text.index(stop)]], "stop_sequence", stop)


async def test_counted_tokens_are_the_prompts(messages: anthropic.resources.AsyncMessages) -> None:
    counted = await messages.count_tokens(model=MODEL, messages=TURNS, system="Be kind.")
    for _ in range(2):  # the second time most of the prompt is cached
        made = await messages.create(model=MODEL, max_tokens=1, messages=TURNS, system="Be kind.")
        usage = made.usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > len(QUESTION)


async def test_leaving_a_message_frees_its_nodes(
    deployment: Served, messages: anthropic.resources.AsyncMessages
) -> None:
    deployment.router.stall_after = 3
    body: dict[str, Any] = {"stream": True, **WARM}
    async with messages.with_streaming_response.create(
        model=MODEL, max_tokens=400, messages=TURNS, extra_body=body
    ) as reply:
        async for _ in reply.iter_lines():
            break
    await idle(deployment)
