"""The AI SDK, a client in JavaScript: text, a stream, an object and a call of a tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.other_clients import ANSWER, KEY, run_program

PROGRAM = Path(__file__).with_name("ai_sdk.mjs")
PACKAGES = Path(sys.prefix) / "node_modules"  # where `make clients` puts them


@pytest.mark.program("node")
@pytest.mark.skipif(not (PACKAGES / "ai").is_dir(), reason="needs the AI SDK")  # before a deployment is started for it
def test_text_streams_objects_and_tools(url: str, model: str, tmp_path: Path) -> None:
    said = json.loads(run_program("node", PROGRAM, url, model, KEY, PACKAGES, folder=tmp_path))
    assert ANSWER in said["text"]
    assert said["streamed"] == said["text"]
    assert said["output"]["city"] in ("Paris", "Rome")
    assert {call["name"] for call in said["calls"]} == {"weather"}
    assert all(call["input"]["city"] in ("Paris", "Rome") for call in said["calls"])
