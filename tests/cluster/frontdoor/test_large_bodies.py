"""Large bodies beside running streams: they are parsed and rendered off the event loop, and put together in one go."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from cluster.contract.generation import MAX_MESSAGES, Chat, ChatMessage
from cluster.contract.plan import tokenize
from cluster.contract.tools import MAX_JSON_VALUES, AnswerStyle
from cluster.frontdoor import http_exchange
from cluster.frontdoor.http_server import MAX_DIGITS
from cluster.frontdoor.json_body import parse_object
from paceline.errors import InvalidRequest
from paceline.results import ToolCall
from paceline.text.tokenizer import Tokenizer
from tests.cluster.frontdoor.test_http_server import answer, connecting
from tests.support.fake_router import FakeRouter
from tests.support.http_app import CHATS, COMPLETIONS
from tests.support.tiny_chat import write_chat_tokenizer

T = TypeVar("T")
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TURNS = 2000
MESSAGES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "assistant", "tool_calls": [CALL]}] * TURNS},
    "/v1/messages": {
        "max_tokens": 1,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * TURNS,
    },
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}] * TURNS},
    "/tokenize": {"messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}] * TURNS},
}


async def turns_beside(work: Awaitable[T]) -> tuple[T, int]:
    """What ``work`` gives, and how often the event loop came round meanwhile."""
    task, turns = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    return await task, turns


@pytest.fixture
def usual_digits() -> Iterator[None]:
    """A server that starts here bounds them for this process."""
    before = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("path", MESSAGES)
async def test_streams_go_on_while_a_large_body_is_parsed(
    client: httpx.AsyncClient, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Mutant: it is parsed on the event loop."""
    threads: list[threading.Thread] = []

    def parse(body: bytes) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return parse_object(body)

    monkeypatch.setattr(http_exchange, "parse_object", parse)
    content = json.dumps(MESSAGES[path])
    for most in (len(content) - 1, len(content)):
        monkeypatch.setattr(http_exchange, "THREAD_ABOVE_BYTES", most)
        assert (await client.post(path, content=content)).status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def tokens_of(tmp_path: Path, calls: dict[str, int]) -> tuple[tuple[int, ...], int]:
    """The tokens of turns with a call each, and how often the loop came round. calls: how many values the arguments of
    each have, by its id."""
    made = {name: ToolCall(name, "f", json.dumps({"a": [1] * (count - 1)})) for name, count in calls.items()}
    chat = Chat(tuple(ChatMessage("assistant", "", (call,)) for call in made.values()))
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path))
    return await turns_beside(tokenize(chat, tokenizer, AnswerStyle("hermes")))


async def test_streams_go_on_while_calls_are_looked_at(tmp_path: Path) -> None:
    """Their arguments are looked at and told the template in a thread. Mutant: their size does not count."""
    tokens, turns = await tokens_of(tmp_path, {str(i): MAX_JSON_VALUES for i in range(8)})
    assert tokens
    assert turns > 8


async def test_a_call_with_too_many_values_is_named(tmp_path: Path) -> None:
    """Mutant: values of a call are not counted."""
    with pytest.raises(InvalidRequest) as refused:
        await tokens_of(tmp_path, {"a": MAX_JSON_VALUES, "b": MAX_JSON_VALUES + 1})
    assert refused.value.field == "messages[1].tool_calls[0].arguments"


async def test_pieces_of_a_turn_are_put_together(client: httpx.AsyncClient, router: FakeRouter) -> None:
    """Each turn has thousands of them."""
    texts = [f"{i}," for i in range(MAX_MESSAGES)]
    blocks = [{"type": "text", "text": text} for text in texts]
    await client.post("/v1/messages", json={"max_tokens": 1, "messages": [{"role": "user", "content": blocks}]})
    thoughts = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]} for text in texts]
    await client.post("/v1/responses", json={"input": thoughts})
    said, thought = (asked.prompt.messages[0] for asked in router.asked if isinstance(asked.prompt, Chat))
    assert said.content == thought.reasoning == "".join(texts)


async def test_a_number_of_too_many_digits_is_refused(router: FakeRouter, usual_digits: None) -> None:
    """Mutant: Python's own bound, 4,300: a body of such numbers keeps the event loop busy for a fifth of a second."""
    body = b'{"prompt": [' + b"9" * (MAX_DIGITS + 1) + b"]}"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    async with connecting(router) as connect:
        status, _, told = await answer((await connect(head.encode() + body))[0])
    assert (status, told["error"]["param"]) == (400, "body")
    assert told["error"]["message"].endswith(f"has a whole number of more than {MAX_DIGITS} digits")
