"""The llm program's library, with a model that its configuration adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.test_own_clients import Capital
from tests.support.other_clients import ANSWER, ASKED, KEY, QUESTION, client

pytestmark = pytest.mark.client("llm")


@pytest.fixture
def served(url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    settings = {"model_id": "served", "model_name": model, "api_base": f"{url}/v1", "supports_schema": True}
    settings["api_key_name"] = "served"  # without one it sends a key of its own
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([settings | {"supports_tools": True}]))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    found = client("llm").get_model("served")
    found.key = KEY
    return found


def test_text_and_streams(served: Any) -> None:
    text = served.prompt(QUESTION, stream=False, temperature=0, max_tokens=24).text()
    assert ANSWER in text
    assert "".join(served.prompt(QUESTION, stream=True, temperature=0, max_tokens=24)) == text


def test_json_and_tools(served: Any) -> None:
    done = served.prompt(ASKED, schema=Capital, stream=False, temperature=0, max_tokens=64)
    assert Capital.model_validate_json(done.text())

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"{city}: sunny"

    options = {"temperature": 0, "max_tokens": 64}
    chain = served.conversation(tools=[weather]).chain(QUESTION, stream=False, chain_limit=3, options=options)
    assert chain.text()
