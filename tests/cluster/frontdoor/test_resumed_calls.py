"""A stream of reasoning and calls of tools goes on from each of its events, in the midst of a call too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.frontdoor.http import HttpOptions, create_app
from paceline.text.tokenizer import Tokenizer
from tests.cluster.frontdoor.test_openai_tools import KNOWN, TOOL, TURNS
from tests.cluster.routing.test_answer_parts import ANSWER, ARGUMENTS, says
from tests.support.http_app import CHATS
from tests.support.scripted_nodes import Fleet, fleet
from tests.support.tiny_chat import write_chat_tokenizer

BODY: dict[str, Any] = {"messages": TURNS, "tools": [TOOL], "seed": 3, "n": 2, "stream": True}
Parts = dict[tuple[int, str], str]


async def ask(made: Fleet, client: httpx.AsyncClient, round_size: int, since: str = "") -> list[tuple[str, Any]]:
    """Id and data of each event."""
    made.nodes["decode-0"].script.round_size = round_size
    response = await client.post(CHATS, json=BODY, headers={"last-event-id": since} if since else {})
    *told, last = response.text.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    pairs = (event.rpartition("data: ") for event in told)
    return [(name.removeprefix("id: ").strip(), json.loads(data)) for name, _, data in pairs]


def joined(events: list[tuple[str, Any]]) -> Parts:
    """Every part of every choice, with its pieces put together. A name or an id that comes twice is seen."""
    parts: Parts = {}
    for choice in (choice for _, event in events for choice in event["choices"]):
        delta = choice["delta"]
        pieces = [("text", delta.get("content")), ("thought", delta.get("reasoning_content"))]
        pieces.append(("end", choice["finish_reason"]))
        for call in delta.get("tool_calls") or ():
            about = {"id": call.get("id"), **call.get("function", {})}
            pieces += [(f"call {call['index']} {name}", piece) for name, piece in about.items()]
        for name, piece in pieces:
            parts[choice["index"], name] = parts.get((choice["index"], name), "") + (piece or "")
    return {where: said for where, said in parts.items() if said}


async def test_from_every_event_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: what was told is counted in characters of the text without the calls; a call's id or name is told
    again; the parser begins anew behind the reasoning."""
    says(monkeypatch, f"hm, hm\n</think>{ANSWER}\n{ANSWER[8:]}")
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path, KNOWN))
    async with fleet(tokenizer=tokenizer, max_model_len=8192) as made:
        app = create_app(made.router, made.router.metrics, HttpOptions(resumable=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            whole = await ask(made, client, 7)
            due = joined(whole)
            assert due[1, "call 1 arguments"] == due[0, "call 0 arguments"] == ARGUMENTS
            assert (due[0, "thought"], due[0, "end"]) == ("hm, hm", "tool_calls")
            cuts = [i for i, (event_id, _) in enumerate(whole) if event_id]
            assert len(cuts) > 20
            for i in cuts:
                rest = await ask(made, client, 5, since=whole[i][0])
                assert joined(whole[: i + 1] + rest) == due, whole[i]
