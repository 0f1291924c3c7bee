"""LlamaIndex's OpenAILike."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("llama-index-llms-openai-like")


@pytest.fixture
def llm(url: str, model: str) -> Any:
    kind = client("llama_index.llms.openai_like").OpenAILike
    return kind(
        model=model, api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        temperature=0, max_tokens=64, max_retries=0,
    )  # fmt: skip


def test_text_and_streams(llm: Any) -> None:
    text = llm.complete(QUESTION).text
    assert ANSWER in text
    assert "".join(part.delta or "" for part in llm.stream_complete(QUESTION)) == text


def test_objects_and_tools(llm: Any) -> None:
    """An object is the arguments of a tool here."""
    assert llm.as_structured_llm(Capital).complete(ASKED).raw.city in ("Paris", "Rome")

    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    tool = client("llama_index.core.tools").FunctionTool.from_defaults(fn=weather)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call, *_) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, list(call.tool_kwargs)) == ("weather", ["city"])
