"""instructor over the openai client: objects by schema, by tool, and in parts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ASKED, KEY, client

pytestmark = pytest.mark.client("instructor")


class AnyObject(BaseModel, extra="allow"):
    """Whatever the answer has."""


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "JSON", "TOOLS"])
def test_objects(url: str, model: str, mode: str) -> None:
    instructor, openai = client("instructor"), client("openai")
    made = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=instructor.Mode[mode])
    asked: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": ASKED}], "response_model": Capital,
        "temperature": 0, "max_tokens": 64, "max_retries": 1,
    }  # fmt: skip
    if mode == "JSON":  # any object will do, and a model as small as this one may choose names of its own
        asked["response_model"] = AnyObject
        assert made.chat.completions.create(**asked)
        return
    assert made.chat.completions.create(**asked).city in ("Paris", "Rome")
    *_, last = made.chat.completions.create_partial(**asked)
    assert last.city in ("Paris", "Rome")
