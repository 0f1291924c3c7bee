"""The official OpenAI client against the real server on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from cluster.frontdoor import http_exchange
from cluster.frontdoor.http import HttpOptions, HttpServer, create_app, serve_http
from cluster.routing.metrics import Metrics
from paceline.errors import ConfigError, InvalidRequest, NodeUnavailable, Overloaded
from tests.support.api_keys import write_keys
from tests.support.certificates import make_folder
from tests.support.fake_router import MODEL, FakeRouter

PROMPT_S = 5.0  # longest wait for a generation to notice that its client is gone
MESSAGES: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
async def server(router: FakeRouter) -> AsyncIterator[HttpServer]:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    yield server
    await server.stop(0.0)


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


# -- answers -----------------------------------------------------------------------------------------------------


async def test_chat(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=11, stop=["x"], n=2, logprobs=True, top_logprobs=1, max_completion_tokens=9
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello you"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5 + 18
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.token for item in logprobs.content] == list("Hello you")
    assert logprobs.content[0].top_logprobs[0].logprob == -0.25
    assert router.asked[0].sampling.seed == 11
    assert router.asked[0].sampling.stop == ("x",)
    assert router.asked[0].max_tokens == 9
    assert answer._request_id == answer.id
    assert answer.model_extra is not None
    assert answer.model_extra["paceline"]["seed"] == 11


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons, usage = ["", ""], ["", ""], None
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
        usage = chunk.usage
    assert (texts, reasons) == (["Hello you"] * 2, ["stop"] * 2)
    assert usage is not None
    assert usage.completion_tokens == 18


async def test_over_https_with_a_key(router: FakeRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client as it is: a key, an address, and the system's variable for roots."""
    folder, keys = make_folder(tmp_path / "certs"), write_keys(tmp_path / "keys.yaml")
    monkeypatch.setenv("SSL_CERT_FILE", str(folder.path / "ca.pem"))
    app = create_app(router, Metrics(), HttpOptions(access=keys.access(MODEL)))
    server = await serve_http(app, "127.0.0.1", 0, folder)
    url = f"https://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=keys.secrets["acme"], max_retries=0, timeout=20) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer.choices[0].message.content == "Hello you"
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        assert "".join([part.choices[0].delta.content or "" async for part in stream]) == "Hello you"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=keys.secrets["wrong"]).models.list()
    assert {asked.tenant for asked in router.asked} == {"acme"}
    await server.stop(0.0)


async def test_continuous_usage(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert (counts, counts[-1]) == (sorted(counts), 9)
    assert (counts[0], len(set(counts))) == (0, 4)  # the role comes before any token
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None} == {5}


async def test_what_clients_send_besides(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    """As guidellm, litellm and the AI SDK do."""
    answer: Any = {"role": "assistant", "content": "a", "provider_specific_fields": {}, "reasoning_content": "hm"}
    again: Any = [{"role": "user", "content": "a", "name": "Ada"}, answer, *MESSAGES]
    extra = {"ignore_eos": True, "use_beam_search": False, "length_penalty": 1.0, "best_of": 1}
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=again, user="u", metadata={"a": "b"}, extra_body=extra
    )
    assert raw.headers["x-paceline-ignored"] == "messages[].provider_specific_fields, metadata, user"
    assert raw.parse().choices[0].message.content == "Hello you"
    assert router.asked[0].sampling.ignore_eos


async def test_completion(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt=[1, 2, 3],
        seed=4,
        stop="x",
        n=2,
        logprobs=2,
        extra_body={"top_k": 5, "speculation": {"num_draft_tokens": 2}},
    )
    assert [choice.text for choice in answer.choices] == ["Hello you"] * 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Hello you")
    assert logprobs.text_offset == list(range(9))
    asked = router.asked[0]
    assert (asked.prompt, asked.sampling.top_k, asked.speculation.num_draft_tokens) == ((1, 2, 3), 5, 2)


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="hi", stream=True, logprobs=0)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello you"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["paceline"]["token_ids"] == [[ord(letter) for letter in "Hello you"]]


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "paceline"


# -- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "guided_regex"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stream": True, "n": 129}, "n"),
    ],
)
async def test_wrong_input_and_then_a_good_one(client: openai.AsyncOpenAI, wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, **wrong)
    assert caught.value.param == param
    assert param in caught.value.message
    good = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert good.choices[0].message.content == "Hello you"


async def test_another_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="gpt", prompt="hi")
    assert caught.value.code == "model_not_found"


async def test_a_prompt_that_is_too_long(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    router.error = InvalidRequest(
        "prompt", "This model's maximum context length is 9 tokens.", "context_length_exceeded"
    )
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is") as caught:
        await client.completions.create(model=MODEL, prompt="hi")
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_overload(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    router.error = Overloaded("full", 7.0)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.completions.create(model=MODEL, prompt="hi")
    assert caught.value.response.headers["retry-after"] == "7"


async def test_failure_mid_stream(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    router.error, router.error_after = NodeUnavailable("decode-0 is gone"), 2
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="decode-0 is gone"):
        _ = [chunk async for chunk in stream]


async def test_ten_megabytes(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(model=MODEL, prompt="x" * 10_000_000)
    assert caught.value.status_code == 413
    assert router.asked == []
    assert (await client.completions.create(model=MODEL, prompt="hi")).choices[0].text == "Hello you"


# -- clients that go away ----------------------------------------------------------------------------------------


async def test_leaving_a_stream_ends_the_generation(client: openai.AsyncOpenAI, router: FakeRouter) -> None:
    router.stall_after = 2
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    assert (await anext(aiter(stream))).choices[0].delta.role == "assistant"
    assert not router.ended.is_set()
    await stream.close()
    await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    assert router.finished == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_byte_ends_the_generation(
    client: openai.AsyncOpenAI, router: FakeRouter, stream: bool
) -> None:
    router.stall_after = 0
    asking = asyncio.create_task(client.completions.create(model=MODEL, prompt="hi", stream=stream))
    await asyncio.wait_for(router.started.wait(), PROMPT_S)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    assert router.finished == 0


async def test_a_client_that_reads_nothing_is_let_go(
    server: HttpServer, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_exchange, "SEND_TIMEOUT_S", 0.2)
    router.rounds = ["x" * 1_000_000] * 20
    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        await asyncio.wait_for(router.ended.wait(), PROMPT_S)
    assert router.finished == 0


# -- the server --------------------------------------------------------------------------------------------------


async def test_stop_lets_requests_end_within_the_grace(router: FakeRouter) -> None:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    router.stall_after = 1
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        asking = asyncio.create_task(client.post(url, json={"prompt": "hi"}))
        await asyncio.wait_for(router.started.wait(), PROMPT_S)
        asyncio.get_running_loop().call_later(0.3, router.release.set)
        await server.stop(PROMPT_S)
        assert router.finished == 1
        assert (await asking).json()["choices"][0]["text"] == "Hello you"
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://127.0.0.1:{server.port}/health")


async def test_stop_is_bounded(router: FakeRouter) -> None:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    router.stall_after = 1
    async with httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        asking = asyncio.create_task(client.post(url, json={"prompt": "hi", "stream": True}))
        await asyncio.wait_for(router.started.wait(), PROMPT_S)
        await asyncio.wait_for(server.stop(0.2), PROMPT_S)
        assert router.ended.is_set()
        with pytest.raises(httpx.RemoteProtocolError):  # cut off, not ended as if it were complete
            await asking
    await server.stop(0.2)


async def test_an_address_that_is_taken(server: HttpServer, router: FakeRouter) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at .*port 0 takes a free one"):
        await serve_http(create_app(router, Metrics()), "127.0.0.1", server.port)
